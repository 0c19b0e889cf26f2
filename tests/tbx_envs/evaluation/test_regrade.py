"""Episodes can be graded again without the agent, and what cannot be graded again is void, never scored."""

import json

import pytest

from tbx_envs.agents.idle import IdleAgent
from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.agents.scripted import ScriptedAgent
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.files import load_rows
from tbx_envs.evaluation.regrade import regrade
from tbx_envs.evaluation.run import run
from tbx_envs.evaluation.transcripts import load_episodes

UIDS = tuple(f"clinic/cancel_visit/{number:03d}" for number in range(6))


def run_in(folder, agent, uids=UIDS, attempts=2):
    return run(agent, uids, attempts=attempts, seed=3, rows_path=folder / "rows.jsonl", max_void_retries=0)


@pytest.mark.parametrize(
    "agent", [OracleAgent(), IdleAgent(), ScriptedAgent(error_rate=1.0)], ids=lambda p: type(p).__name__
)
def test_grading_again_gives_the_same_verdicts_as_the_first_time(tmp_path, agent):
    rows = run_in(tmp_path / "first", agent)
    again = regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl")
    assert [row["passed"] for row in again] == [row["passed"] for row in rows]
    first, second = (list(load_episodes(tmp_path / name / "episodes.jsonl")) for name in ("first", "again"))
    assert second == first
    assert load_rows(tmp_path / "again")[0]["regraded"] == {"judge": None}


def test_an_evaluation_run_does_not_resume_where_episodes_were_graded_again(tmp_path):
    run_in(tmp_path / "first", IdleAgent(), UIDS[:1])
    regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl")
    with pytest.raises(ConfigError, match="regraded"):
        run_in(tmp_path / "again", IdleAgent(), UIDS[:1])


def test_only_the_tasks_asked_for_are_graded_again(tmp_path):
    run_in(tmp_path / "first", IdleAgent())
    again = regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl", uids=UIDS[1:2])
    assert [(row["uid"], row["attempt"]) for row in again] == [(UIDS[1], 0), (UIDS[1], 1)]
    with pytest.raises(ConfigError, match="none of the tasks"):
        regrade(tmp_path / "first", tmp_path / "other" / "rows.jsonl", uids=["clinic/cancel_visit/099"])


def test_an_episode_whose_tools_have_changed_is_void(tmp_path):
    run_in(tmp_path / "first", OracleAgent(), UIDS[:1], attempts=1)
    path = tmp_path / "first" / "episodes.jsonl"
    record = json.loads(path.read_text())
    result = next(message for message in record["transcript"] if message["kind"] == "result")
    result["text"] = result["text"].replace("{", "{ ", 1)
    path.write_text(json.dumps(record) + "\n")
    (row,) = regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl")
    assert (row["passed"], row["reward"], row["fault"]) == (None, None, "check")
    assert "is not answered as when the episode ran" in row["fault_message"]


def test_a_void_episode_stays_void(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("gone")

    with monkeypatch.context() as patched:
        patched.setattr("tbx_envs.domains.runtime.check_state", broken)
        run_in(tmp_path / "first", IdleAgent(), UIDS[:1], attempts=1)
    (row,) = regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl")
    assert (row["passed"], row["fault"]) == (None, "check")


def test_grading_again_resumes_where_it_was_interrupted(tmp_path):
    rows = run_in(tmp_path / "first", IdleAgent())
    graded = []

    def stop_after_three(row):
        graded.append(row)
        if len(graded) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl", progress=stop_after_three)
    again = regrade(tmp_path / "first", tmp_path / "again" / "rows.jsonl", progress=graded.append)
    assert len(graded) == len(again) == len(rows)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no evaluation run"):
        regrade(tmp_path, tmp_path / "again" / "rows.jsonl")
