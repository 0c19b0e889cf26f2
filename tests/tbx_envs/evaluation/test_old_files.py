"""Evaluation folders and pools that tbx 0.1 wrote can be resumed, reported, compared and read."""

import dataclasses
import json

import pytest

from tbx_envs.agents.scripted import ScriptedAgent
from tbx_envs.agents.turns import play_turns
from tbx_envs.commands.cli import main
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.compare import compare_folders
from tbx_envs.evaluation.files import load_rows
from tbx_envs.evaluation.metrics import Tally
from tbx_envs.evaluation.pool import save_pool, select_pool
from tbx_envs.evaluation.run import run
from tbx_envs.evaluation.transcripts import load_episodes
from tbx_envs.messages import ToolCall, ToolResult, Turn
from tbx_envs.testing.agents import PrescribedAgent

UIDS = tuple(f"clinic/cancel_visit/{number:03d}" for number in range(4))
POLICY = {"name": "scripted", "error_rate": 0.5}


def run_in(folder, agent, policy=POLICY):
    return run(agent, UIDS, attempts=2, seed=1, rows_path=folder / "rows.jsonl", max_void_retries=0, policy=policy)


class AsksForAStranger:
    """Makes one call, which is rejected."""

    def run(self, attempts):
        def agent(attempt, opening):
            yield Turn(calls=(ToolCall("", "find_patient", {"name": "No One"}),))
            yield Turn("<DONE>")

        return play_turns(attempts, agent)


def as_the_first_version_wrote_it(folder):
    """Give the files of a run the names, the key and the status of tbx 0.1."""
    header = json.loads((folder / "evaluation.json").read_text())
    header["policy"] = {"name": "scripted", "lapse": header["policy"]["error_rate"]}
    (folder / "campaign.json").write_text(json.dumps(header, indent=2) + "\n")
    (folder / "evaluation.json").unlink()
    episodes = folder / "episodes.jsonl"
    episodes.write_text(episodes.read_text().replace('"status": "rejected"', '"status": "refused"'))


@pytest.fixture
def old(tmp_path):
    rows = run_in(tmp_path / "old", ScriptedAgent(error_rate=0.5))
    as_the_first_version_wrote_it(tmp_path / "old")
    return tmp_path / "old", rows


def test_an_old_run_is_resumed_where_it_stopped(old):
    folder, rows = old
    path = folder / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    rest = PrescribedAgent(lambda uid, attempt, tries: "pass")
    resumed = run_in(folder, rest)
    assert len(rest.asked) == len(rows) - 5
    assert resumed[:5] == rows[:5]
    assert not (folder / "evaluation.json").exists()


def test_an_old_run_of_another_error_rate_is_not_resumed(old):
    folder, _ = old
    with pytest.raises(
        ConfigError, match=r"campaign\.json belongs to another evaluation run:\n  policy: .*0\.5.*0\.25"
    ):
        run_in(folder, PrescribedAgent(lambda uid, attempt, tries: "pass"), {"name": "scripted", "error_rate": 0.25})


def test_an_old_run_is_reported_and_compared(old, tmp_path, capsys):
    folder, rows = old
    fingerprint, read = load_rows(folder)
    assert (fingerprint["policy"], read) == (POLICY, rows)
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"] == sum(row["passed"] for row in rows)
    run_in(tmp_path / "new", ScriptedAgent(error_rate=0.5))
    assert compare_folders(folder, tmp_path / "new").difference == 0.0


def test_an_old_pool_is_the_same_pool_and_stays_as_it_is(tmp_path):
    path = tmp_path / "pool.json"
    made = select_pool([Tally(UIDS[0], "cancel_visit", 1, 2)], bands=("easy", "medium", "hard"), policy=POLICY, seed=1)
    save_pool(made, path)
    old = path.read_text().replace('"error_rate"', '"lapse"')
    assert old != path.read_text()
    path.write_text(old)
    save_pool(made, path)
    assert path.read_text() == old
    with pytest.raises(ConfigError, match="holds another pool"):
        save_pool(dataclasses.replace(made, policy={"name": "scripted", "error_rate": 0.25}), path)


def test_a_rejected_call_of_an_old_transcript_has_its_new_status(tmp_path):
    run_in(tmp_path / "run", AsksForAStranger())
    before = list(load_episodes(tmp_path / "run" / "episodes.jsonl"))
    as_the_first_version_wrote_it(tmp_path / "run")
    assert '"status": "refused"' in (tmp_path / "run" / "episodes.jsonl").read_text()
    after = list(load_episodes(tmp_path / "run" / "episodes.jsonl"))
    results = [message for episode in after for message in episode.transcript if isinstance(message, ToolResult)]
    assert {result.status for result in results} == {"rejected"}
    assert after == before
