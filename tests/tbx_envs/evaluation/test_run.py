import dataclasses
import json

import pytest

from tbx_envs.agents import Attempt
from tbx_envs.agents.idle import IdlePlayer
from tbx_envs.agents.oracle import OraclePlayer
from tbx_envs.episode import FinishReason
from tbx_envs.errors import CheckFault, ConfigError, PolicyFault
from tbx_envs.evaluation.run import campaign_row, refuse_many_voids, run_campaign, summarize, tallies_of, task_hash
from tbx_envs.evaluation.task_lists import find_task, is_unseen_family, select_tasks
from tbx_envs.evaluation.transcripts import load_episodes
from tbx_envs.testing.players import PrescribedPlayer, prescribed_episode

UIDS = (*select_tasks("train")[:2], select_tasks("heldout")[-1])


def campaign(folder, player, uids=UIDS, attempts=3, seed=0, retries=2, **options):
    return run_campaign(
        player,
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
    rows = campaign(tmp_path, PrescribedPlayer(alternating), policy={"name": "chance"}, progress=seen.append)
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


def test_seeds_differ_between_attempts_and_are_a_function_of_the_campaigns_seed(tmp_path):
    first = campaign(tmp_path / "a", PrescribedPlayer(alternating))
    again = campaign(tmp_path / "b", PrescribedPlayer(alternating))
    other = campaign(tmp_path / "c", PrescribedPlayer(alternating), seed=1)
    assert len({row["seed"] for row in first}) == len(first)
    assert [row["seed"] for row in first] == [row["seed"] for row in again]
    assert not {row["seed"] for row in first} & {row["seed"] for row in other}


def test_a_void_attempt_is_made_again_with_a_fresh_seed(tmp_path):
    player = PrescribedPlayer(lambda uid, attempt, tries: "void" if attempt == 1 and tries < 2 else "pass")
    rows = campaign(tmp_path, player)
    assert all(row["passed"] for row in rows)
    assert [row["retry"] for row in rows] == [0, 2, 0] * 3
    assert len({attempt.seed for attempt in player.asked}) == len(player.asked) == 9 + 6


def test_an_attempt_that_stays_void_is_a_void_row_and_never_a_reward(tmp_path):
    player = PrescribedPlayer(lambda uid, attempt, tries: "void" if attempt == 0 else "pass")
    rows = campaign(tmp_path, player, retries=1)
    void = [row for row in rows if row["attempt"] == 0]
    for row in void:
        assert row["passed"] is None
        assert row["reward"] is None
        assert (row["fault"], row["fault_message"]) == ("tool", "the tool server is gone")
    assert len(player.asked) == 9 + 3
    summary = summarize(rows, 3)
    assert summary["pass_at_1"] == 1.0
    assert (summary["voids"], summary["tasks_short"], summary["observed_3_of_3"]) == (3, 3, 0)
    assert summary["void_kinds"] == {"tool": 3}
    assert summary["retries"] == 3


def test_an_interrupted_campaign_goes_on_and_equals_an_unbroken_one(tmp_path):
    whole = campaign(tmp_path / "whole", PrescribedPlayer(alternating))
    with pytest.raises(KeyboardInterrupt):
        campaign(tmp_path / "cut", PrescribedPlayer(alternating, stop_after=4))
    for name in ("rows.jsonl", "episodes.jsonl"):  # the interruption came in the middle of a line
        with (tmp_path / "cut" / name).open("a") as file:
            file.write('{"uid": "clin')
    rest = PrescribedPlayer(alternating)
    assert campaign(tmp_path / "cut", rest) == whole
    assert len(rest.asked) == len(whole) - 4
    for name in ("rows.jsonl", "episodes.jsonl", "campaign.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finished_campaign_is_not_played_again(tmp_path):
    rows = campaign(tmp_path, PrescribedPlayer(alternating))
    idle = PrescribedPlayer(alternating)
    assert campaign(tmp_path, idle) == rows
    assert idle.asked == []


def test_void_rows_are_made_again_when_the_campaign_is_run_again(tmp_path):
    broken = PrescribedPlayer(lambda uid, attempt, tries: "void" if attempt == 2 else "pass")
    before = campaign(tmp_path, broken, retries=1)
    mended = PrescribedPlayer(lambda uid, attempt, tries: "fail")
    after = campaign(tmp_path, mended, retries=1)
    assert {attempt.attempt for attempt in mended.asked} == {2}
    assert not {attempt.seed for attempt in mended.asked} & {attempt.seed for attempt in broken.asked}
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
            "policy: there {'name': 'PrescribedPlayer'}, asked for {'name': 'other'}",
        ),
        ({"uids": UIDS[:1]}, "tasks: 2 only there, 0 only asked for, 0 with another content"),
    ],
)
def test_rows_of_another_campaign_are_never_mixed_in(tmp_path, change, told):
    campaign(tmp_path, PrescribedPlayer(alternating))
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="Choose another output_dir") as raised:
        campaign(tmp_path, PrescribedPlayer(alternating), **change)
    assert told in str(raised.value)
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_a_task_that_changed_since_is_noticed(tmp_path):
    campaign(tmp_path, PrescribedPlayer(alternating))
    header = json.loads((tmp_path / "campaign.json").read_text())
    header["tasks"][UIDS[1]] = "0" * 64
    (tmp_path / "campaign.json").write_text(json.dumps(header))
    with pytest.raises(ConfigError, match=f"1 with another content, such as {UIDS[1]}"):
        campaign(tmp_path, PrescribedPlayer(alternating))


def test_rows_without_their_header_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no campaign\.json beside it"):
        campaign(tmp_path, PrescribedPlayer(alternating))


def test_a_task_named_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="named twice"):
        campaign(tmp_path, PrescribedPlayer(alternating), uids=UIDS[:1] * 2)


def test_a_player_that_leaves_attempts_out_is_a_failure_of_the_run(tmp_path):
    class Lazy(PrescribedPlayer):
        def play(self, attempts):
            return super().play(attempts[:-1])

    with pytest.raises(PolicyFault, match="no episode for 1 of 9 attempts"):
        campaign(tmp_path, Lazy(alternating))


def test_a_player_that_gives_back_another_attempt_is_a_failure_of_the_run(tmp_path):
    class Confused(PrescribedPlayer):
        def play(self, attempts):
            for attempt in attempts:
                yield prescribed_episode(Attempt(attempt.uid, attempt.attempt, attempt.seed + 1), "pass")

    with pytest.raises(PolicyFault, match="not asked for"):
        campaign(tmp_path, Confused(alternating))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 0.5, 2.0, None])
def test_a_reward_that_no_environment_gives_is_refused(reward):
    strange = dataclasses.replace(prescribed_episode(Attempt(UIDS[0], 0, 1), "pass"), reward=reward)
    with pytest.raises(CheckFault, match="wanted its report"):
        campaign_row(strange, "p", 0, "hash")


def test_a_void_episode_with_a_reward_is_refused():
    strange = dataclasses.replace(prescribed_episode(Attempt(UIDS[0], 0, 1), "void"), reward=0.0)
    with pytest.raises(CheckFault, match="None for a void one"):
        campaign_row(strange, "p", 0, "hash")


def test_a_run_with_too_many_voids_ends_as_an_error_that_names_the_first_fault(tmp_path):
    player = PrescribedPlayer(lambda uid, attempt, tries: "void" if attempt == 0 else "pass")
    with pytest.raises(PolicyFault, match=r"3 of 9 attempts are void .* tool: the tool server is gone"):
        refuse_many_voids(campaign(tmp_path, player))


def test_a_single_void_in_many_does_not_end_the_run(tmp_path):
    player = PrescribedPlayer(lambda uid, attempt, tries: "void" if (uid, attempt) == (UIDS[0], 0) else "pass")
    refuse_many_voids(campaign(tmp_path, player, attempts=7))


def test_the_summary_has_the_names_that_scripts_rely_on(tmp_path):
    rows = campaign(tmp_path, PrescribedPlayer(lambda uid, attempt, tries: "pass"), attempts=20)
    summary = summarize(rows, 20)
    for measured in (summary, summary["unseen_families"], *summary["families"].values()):
        assert {"pass_at_1", "pass_at_20", "observed_20_of_20", "tasks"} <= measured.keys()
    assert summary["observed_20_of_20"] == 3
    assert summary["unseen_families"]["tasks"] == sum(is_unseen_family(find_task(uid)) for uid in UIDS) == 1
    assert json.loads(json.dumps(summary)) == summary


def test_tallies_count_voids_apart():
    rows = [{"uid": "a/f/000", "family": "f", "passed": passed} for passed in (True, False, None, True)]
    (tally,) = tallies_of(rows)
    assert (tally.passes, tally.attempts, tally.voids) == (2, 3, 1)


def test_the_oracle_passes_and_the_idle_policy_does_not_through_the_real_environment(tmp_path):
    passed = campaign(tmp_path / "oracle", OraclePlayer(), attempts=1)
    assert [row["passed"] for row in passed] == [True] * 3
    idle = campaign(tmp_path / "idle", IdlePlayer(), attempts=1)
    assert [row["passed"] for row in idle] == [False] * 3
    assert {row["finish_reason"] for row in idle} == {str(FinishReason.DONE)}
