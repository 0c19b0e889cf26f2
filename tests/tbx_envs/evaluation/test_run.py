import dataclasses
import json

import pytest

from tbx_envs.agents import Attempt
from tbx_envs.agents.idle import IdleAgent
from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.episode import FinishReason
from tbx_envs.errors import CheckFault, ConfigError, PolicyFault, StorageError
from tbx_envs.evaluation.run import refuse_many_voids, row_of, run, summarize, tallies_of
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.evaluation.transcripts import load_episodes
from tbx_envs.sources import find_task, is_heldout_family, task_hash
from tbx_envs.testing.agents import PrescribedAgent, prescribed_episode

UIDS = (*select_tasks("train")[:2], select_tasks("heldout")[-1])


def run_in(folder, agent, uids=UIDS, attempts=3, seed=0, retries=2, **options):
    return run(
        agent,
        uids,
        attempts=attempts,
        seed=seed,
        rows_path=folder / "rows.jsonl",
        max_void_retries=retries,
        **options,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def alternating(uid, attempt, tries):
    return "pass" if attempt % 2 else "fail"


def test_every_attempt_has_one_row_and_one_transcript(tmp_path):
    seen = []
    rows = run_in(tmp_path, PrescribedAgent(alternating), policy={"name": "chance"}, progress=seen.append)
    assert lines(tmp_path / "rows.jsonl") == rows
    assert sorted(map(json.dumps, seen)) == sorted(map(json.dumps, rows))
    assert [(row["uid"], row["attempt"]) for row in rows] == [(uid, n) for uid in UIDS for n in range(3)]
    first = rows[0]
    assert first["passed"] is False
    assert first["reward"] == 0.0
    assert (first["fault"], first["fault_message"], first["finish_reason"]) == (None, None, "done")
    assert (first["agent_turns"], first["tool_calls"], first["usage"]) == (1, 0, {"sampled_tokens": 7})
    assert (first["policy"], first["family"]) == ("chance", find_task(UIDS[0]).family)
    assert first["content_hash"] == task_hash(UIDS[0])
    kept = list(load_episodes(tmp_path / "episodes.jsonl"))
    assert kept == [
        prescribed_episode(Attempt(row["uid"], row["attempt"], row["seed"]), alternating(0, row["attempt"], 0))
        for row in rows
    ]


def test_seeds_differ_between_attempts_and_are_a_function_of_the_runs_seed(tmp_path):
    first = run_in(tmp_path / "a", PrescribedAgent(alternating))
    again = run_in(tmp_path / "b", PrescribedAgent(alternating))
    other = run_in(tmp_path / "c", PrescribedAgent(alternating), seed=1)
    assert len({row["seed"] for row in first}) == len(first)
    assert [row["seed"] for row in first] == [row["seed"] for row in again]
    assert not {row["seed"] for row in first} & {row["seed"] for row in other}


def test_a_void_attempt_is_repeated_with_a_fresh_seed(tmp_path):
    agent = PrescribedAgent(lambda uid, attempt, tries: "void" if attempt == 1 and tries < 2 else "pass")
    rows = run_in(tmp_path, agent)
    assert all(row["passed"] for row in rows)
    assert [row["retry"] for row in rows] == [0, 2, 0] * 3
    assert len({attempt.seed for attempt in agent.asked}) == len(agent.asked) == 9 + 6


def test_an_attempt_that_stays_void_is_a_void_row_and_never_a_reward(tmp_path):
    agent = PrescribedAgent(lambda uid, attempt, tries: "void" if attempt == 0 else "pass")
    rows = run_in(tmp_path, agent, retries=1)
    void = [row for row in rows if row["attempt"] == 0]
    for row in void:
        assert row["passed"] is None
        assert row["reward"] is None
        assert (row["fault"], row["fault_message"]) == ("tool", "the tool server is gone")
    assert len(agent.asked) == 9 + 3
    summary = summarize(rows, 3)
    assert summary["pass_at_1"] == 1.0
    assert (summary["voids"], summary["tasks_short"], summary["observed_3_of_3"]) == (3, 3, 0)
    assert summary["void_kinds"] == {"tool": 3}
    assert summary["retries"] == 3


def test_an_interrupted_run_is_resumed_and_equals_an_uninterrupted_one(tmp_path):
    whole = run_in(tmp_path / "whole", PrescribedAgent(alternating))
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "cut", PrescribedAgent(alternating, stop_after=4))
    for name in ("rows.jsonl", "episodes.jsonl"):  # as if interrupted in the middle of a line
        with (tmp_path / "cut" / name).open("a") as file:
            file.write('{"uid": "clin')
    rest = PrescribedAgent(alternating)
    assert run_in(tmp_path / "cut", rest) == whole
    assert len(rest.asked) == len(whole) - 4
    for name in ("rows.jsonl", "episodes.jsonl", "evaluation.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("voids_before", [1, 9, 13])  # in the first round, at its end, in the second
def test_what_a_void_try_used_is_on_disk_before_its_attempt_is_settled(tmp_path, voids_before):
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, PrescribedAgent(lambda uid, attempt, tries: "void", stop_after=voids_before), retries=3)
    assert len(lines(tmp_path / "voids.jsonl")) == voids_before and not (tmp_path / "rows.jsonl").exists()
    with (tmp_path / "voids.jsonl").open("a") as file:  # as if killed in the middle of a line
        file.write('{"uid": "clin')
    again = PrescribedAgent(lambda uid, attempt, tries: "void" if tries == 0 else "pass")
    rows = run_in(tmp_path, again, retries=3)
    assert sum(row["void_usage"]["sampled_tokens"] for row in rows) == 7 * (voids_before + 9)
    assert sum(row["retry"] for row in rows) == sum(len(row["void_faults"]) for row in rows) == voids_before + 9
    assert summarize(rows, 3)["retries"] == voids_before + 9 and all(row["passed"] for row in rows)


def test_kept_rows_are_told_before_the_first_attempt(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, PrescribedAgent(alternating, stop_after=4))
    told, new = [], []
    rows = run_in(tmp_path, PrescribedAgent(alternating), kept=told.append, progress=new.append)
    assert len(told) == 1 and len(told[0]) == 4 and len(new) == len(rows) - 4


def test_a_finished_run_is_not_repeated(tmp_path):
    rows = run_in(tmp_path, PrescribedAgent(alternating))
    idle = PrescribedAgent(alternating)
    assert run_in(tmp_path, idle) == rows
    assert idle.asked == []


def test_void_rows_are_repeated_when_the_run_is_resumed(tmp_path):
    broken = PrescribedAgent(lambda uid, attempt, tries: "void" if attempt == 2 else "pass")
    before = run_in(tmp_path, broken, retries=1)
    repaired = PrescribedAgent(lambda uid, attempt, tries: "fail")
    after = run_in(tmp_path, repaired, retries=1)
    assert {attempt.index for attempt in repaired.asked} == {2}
    assert not {attempt.seed for attempt in repaired.asked} & {attempt.seed for attempt in broken.asked}
    assert [row for row in after if row["attempt"] < 2] == [row for row in before if row["attempt"] < 2]
    assert all(row["passed"] is False and row["retry"] == 2 for row in after if row["attempt"] == 2)
    assert lines(tmp_path / "rows.jsonl") == after
    assert [e.passed for e in load_episodes(tmp_path / "episodes.jsonl")] == [row["passed"] for row in after]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed: there 0, asked for 1"),
        ({"attempts": 4}, "attempts: there 3, asked for 4"),
        (
            {"policy": {"name": "other"}},
            "policy: there {'name': 'PrescribedAgent'}, asked for {'name': 'other'}",
        ),
        ({"uids": UIDS[:1]}, "tasks: 2 only there, 0 only asked for, 0 with different content"),
    ],
)
def test_rows_of_another_run_are_never_mixed_in(tmp_path, change, told):
    run_in(tmp_path, PrescribedAgent(alternating))
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="Choose another output_dir") as raised:
        run_in(tmp_path, PrescribedAgent(alternating), **change)
    assert told in str(raised.value)
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_a_task_that_changed_since_is_noticed(tmp_path):
    run_in(tmp_path, PrescribedAgent(alternating))
    header = json.loads((tmp_path / "evaluation.json").read_text())
    header["tasks"][UIDS[1]] = "0" * 64
    (tmp_path / "evaluation.json").write_text(json.dumps(header))
    with pytest.raises(ConfigError, match=f"1 with different content, such as {UIDS[1]}"):
        run_in(tmp_path, PrescribedAgent(alternating))


def test_rows_without_their_header_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no evaluation\.json beside it"):
        run_in(tmp_path, PrescribedAgent(alternating))


def test_a_task_given_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="given twice"):
        run_in(tmp_path, PrescribedAgent(alternating), uids=UIDS[:1] * 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"uids": "clinic/refill/000"}, r"such as select_tasks\('clinic/refill/000'\)"),
        ({"attempts": 0}, "attempts=0: give the number"),
    ],
)
def test_what_is_no_list_of_tasks_and_no_number_of_attempts_is_refused(given, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        run_in(tmp_path, PrescribedAgent(alternating), **given)
    assert list(tmp_path.iterdir()) == []


def test_an_agent_whose_run_returns_nothing_is_told_so(tmp_path):
    class Forgetful(PrescribedAgent):
        def run(self, attempts):
            super().run(attempts)

    with pytest.raises(PolicyFault, match=r"Forgetful\.run\(attempts\) returned None\. Yield one episode"):
        run_in(tmp_path, Forgetful(alternating))


def test_a_place_for_rows_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/a/rows\.jsonl cannot be written: Not a directory"):
        run_in(tmp_path / "file" / "a", PrescribedAgent(alternating))


def test_an_agent_that_leaves_attempts_out_is_a_failure_of_the_run(tmp_path):
    class Lazy(PrescribedAgent):
        def run(self, attempts):
            return super().run(attempts[:-1])

    with pytest.raises(PolicyFault, match="no episode for 1 of 9 attempts"):
        run_in(tmp_path, Lazy(alternating))


def test_an_agent_that_yields_another_attempt_is_a_failure_of_the_run(tmp_path):
    class Confused(PrescribedAgent):
        def run(self, attempts):
            for attempt in attempts:
                yield prescribed_episode(Attempt(attempt.uid, attempt.index, attempt.seed + 1), "pass")

    with pytest.raises(PolicyFault, match="not asked for"):
        run_in(tmp_path, Confused(alternating))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 0.5, 2.0, None])
def test_a_reward_that_no_environment_gives_is_refused(reward):
    strange = dataclasses.replace(prescribed_episode(Attempt(UIDS[0], 0, 1), "pass"), reward=reward)
    with pytest.raises(CheckFault, match="expected its report"):
        row_of(strange, "p", 0, "hash")


def test_a_void_episode_with_a_reward_is_refused():
    strange = dataclasses.replace(prescribed_episode(Attempt(UIDS[0], 0, 1), "void"), reward=0.0)
    with pytest.raises(CheckFault, match="None for a void one"):
        row_of(strange, "p", 0, "hash")


def test_a_run_with_too_many_voids_ends_with_an_error_that_names_the_first_fault(tmp_path):
    agent = PrescribedAgent(lambda uid, attempt, tries: "void" if attempt == 0 else "pass")
    with pytest.raises(PolicyFault, match=r"3 of 9 attempts are void .* tool: the tool server is gone"):
        refuse_many_voids(run_in(tmp_path, agent))


def test_a_single_void_in_many_does_not_end_the_run(tmp_path):
    agent = PrescribedAgent(lambda uid, attempt, tries: "void" if (uid, attempt) == (UIDS[0], 0) else "pass")
    refuse_many_voids(run_in(tmp_path, agent, attempts=7))


def test_the_summary_has_the_names_that_scripts_rely_on(tmp_path):
    rows = run_in(tmp_path, PrescribedAgent(lambda uid, attempt, tries: "pass"), attempts=20)
    summary = summarize(rows, 20)
    for measured in (summary, summary["unseen_families"], *summary["families"].values()):
        assert {"pass_at_1", "pass_at_20", "observed_20_of_20", "tasks"} <= measured.keys()
    assert summary["observed_20_of_20"] == 3
    assert summary["unseen_families"]["tasks"] == sum(is_heldout_family(find_task(uid)) for uid in UIDS) == 1
    assert json.loads(json.dumps(summary)) == summary


def test_tallies_count_voids_apart():
    rows = [{"uid": "a/f/000", "family": "f", "passed": passed} for passed in (True, False, None, True)]
    (tally,) = tallies_of(rows)
    assert (tally.passes, tally.attempts, tally.voids) == (2, 3, 1)


def test_the_oracle_passes_and_the_idle_agent_does_not_through_the_real_environment(tmp_path):
    passed = run_in(tmp_path / "oracle", OracleAgent(), attempts=1)
    assert [row["passed"] for row in passed] == [True] * 3
    idle = run_in(tmp_path / "idle", IdleAgent(), attempts=1)
    assert [row["passed"] for row in idle] == [False] * 3
    assert {row["finish_reason"] for row in idle} == {str(FinishReason.DONE)}
