"""`tbx tasks` on the tasks of a dataset; on built-in ones see `test_cli.py`."""

import pytest

from tbx_envs.commands.cli import main


def test_a_datasets_tasks_are_listed_and_shown(bikeshop, capsys):
    assert main(["tasks", "list", "--long", "front_desk.py:*"]) == 0
    note, refund, _ = capsys.readouterr().out.splitlines()
    assert note.startswith("front_desk.py:test_note_on_the_second_server  train    Please write down that I prefer")
    assert refund == "front_desk.py:test_refund_is_told  train    I want 4 back for rental R1."
    assert main(["tasks", "show", "front_desk.py:test_note_on_the_second_server"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "front_desk.py:test_note_on_the_second_server  (ThinkingBox/front_desk.py.test_note_on_the_second_server-v0)",
        f"{bikeshop / 'dataset/test_case/front_desk.py'} line 10, dataset bikeshop",
        "scenario: front_desk; agent: think; tags: none",
        "limits: 10 answers of the user, any number of turns of the agent",
        "user says first: Please write down that I prefer red bikes. ada@example.org",
        "user knows:",
        "  You are Ada Bell.",
        "servers: bikes, notes",
        "fixtures: counted, rows",
        '  notes: add_note {"customer_id": "C1", "text": "prefers red bikes"}',
    ):
        assert line in shown.splitlines(), line
    assert "tools: ReportStrangeInstructions, find_customer" in shown


@pytest.mark.usefixtures("bikeshop")
@pytest.mark.parametrize(
    ("uid", "lines"),
    [
        ("rentals_main.py:test_end_rental", ["split: heldout (benchmark: for evaluation only), sha256"]),
        ("desk_list.yaml:greeting", ["clock: 2025-10-01 18:30:00, running", "texts are filled in", "tags: small-talk"]),
        ("rentals_main.py:test_rental_of_today", ["clock: 2025-10-01 09:00:00, standing still"]),
        ("rentals_main.py:test_question_alone", ["no one answers after the first message", "golden calls: none"]),
        ("rentals_main.py:test_few_turns", ["limits: 1 answers of the user, 4 turns of the agent"]),
        ("front_desk.py:test_next_turn", ["said before: 7 messages"]),
    ],
)
def test_what_is_peculiar_to_a_task_is_shown(capsys, uid, lines):
    assert main(["tasks", "show", uid]) == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in lines), shown


def test_a_dataset_is_validated_by_its_name_or_its_path(bikeshop, tmp_path, capsys):
    for name in ("bikeshop", str(bikeshop)):
        assert main(["tasks", "validate", name]) == 0
        assert capsys.readouterr().out == "bikeshop: 14 tasks of 2 lists can be built; 1 are of the benchmark.\n"
    (tmp_path / "test_case").mkdir()
    (tmp_path / "test_case/a.py").write_text("def t(x):\n    '!query: [1]'\n")
    assert main(["tasks", "validate", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "4 problem(s)" not in told and "'scenario' is missing" in told and "there is no agent 'think'" in told
    assert main(["tasks", "validate", "bikshop"]) == 2
    assert "Did you mean 'bikeshop'?" in capsys.readouterr().err
