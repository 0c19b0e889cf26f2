"""`tbx tasks` on the tasks of a dataset; on built-in ones see `test_cli.py`."""

import pathlib
import shutil

import pytest

from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.commands.cli import main
from tbx_envs.errors import DomainError
from tbx_envs.evaluation.report import run_notes
from tbx_envs.evaluation.run import refuse_many_voids, run, summarize
from tbx_envs.thinkingbox import dataset as datasets

BIKESHOP = pathlib.Path(__file__).parents[2] / "data" / "bikeshop"
MIXED = ("front_desk.py:test_refund_is_told", "rentals_main.py:test_end_rental", "desk_list.yaml:greeting")


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
    built = "bikeshop: 14 tasks of 2 lists can be built; 1 are of the benchmark.\n"
    for name in ("bikeshop", str(bikeshop)):
        assert main(["tasks", "validate", name, "--no-servers"]) == 0
        assert capsys.readouterr().out == built
    (tmp_path / "test_case").mkdir()
    (tmp_path / "test_case/a.py").write_text("def t(x):\n    '!query: [1]'\n")
    assert main(["tasks", "validate", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "4 problem(s)" not in told and "'scenario' is missing" in told and "there is no agent 'think'" in told
    assert main(["tasks", "validate", "bikshop"]) == 2
    assert "Did you mean 'bikeshop'?" in capsys.readouterr().err


@pytest.mark.usefixtures("bikeshop")
def test_tasks_that_cannot_be_run_are_found_by_validate_and_set_aside_by_a_run(tmp_path, capsys):
    """A scenario with a tool, and one with a server, that is not there; the tasks of others are attempted."""
    shutil.copytree(BIKESHOP, tmp_path / "shop")
    scenarios = tmp_path / "shop" / "dataset" / "scenario"
    for name, before, after in (
        ("front_desk", "- name: list_notes", "- name: list_nodes"),
        ("trouble", "world_state:", "world_state:\n  ghost: {}"),
    ):
        text = (scenarios / f"{name}.yaml").read_text()
        (scenarios / f"{name}.yaml").write_text(text.replace(before, after))
        assert before in text
    for registered in (datasets._registered, datasets._owners):
        registered.clear()
    datasets.register_dataset(tmp_path / "shop", name="broken")
    assert main(["tasks", "validate", "broken"]) == 2
    told = capsys.readouterr().err
    assert MIXED[1] not in told and "'list_nodes', which no server has. Did you mean 'list_notes'" in told
    assert "has no server 'ghost'" in told
    rows = run(OracleAgent(), MIXED, attempts=1, seed=0, rows_path=tmp_path / "run" / "rows.jsonl", max_void_retries=3)
    assert [(row["passed"], row["fault"], row["retry"]) for row in rows] == (
        [(None, "task", 0), (True, None, 0), (None, "task", 0)]
    )
    summary = summarize(rows, 1)
    assert list(summary["set_aside"]) == [MIXED[0], MIXED[2]] and summary["pass_at_1"] == 1.0
    notes = "\n".join(run_notes(summary, 1))
    assert "list_nodes" in notes and "ghost" in notes
    refuse_many_voids(rows)
    with pytest.raises(DomainError, match=r"(?s)none of 2 task.s. can be run\. The first: .*list_nodes"):
        refuse_many_voids([row for row in rows if row["fault"]])
