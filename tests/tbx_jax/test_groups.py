"""Collecting groups, with attempts whose outcomes are scripted."""

import dataclasses

import numpy as np
import pytest
from tiny_policy import ALGO

from tbx_envs.episode import CheckReport, Episode, Fault, FinishReason
from tbx_envs.errors import EnvironmentFault
from tbx_jax.advantages import group_advantages
from tbx_jax.groups import collect_groups
from tbx_jax.plan import TaskPlan
from tbx_jax.rollout import Rollout
from tbx_jax.trajectory import Trajectory

UIDS = tuple(f"t/t/{number:03d}" for number in range(20))
ORDER = TaskPlan(UIDS, 0).take(0, 20)[0]


def rollout(attempt, outcome):
    """An attempt that passed (1), failed (0) or was void (None)."""
    void = outcome is None
    episode = Episode(
        uid=attempt.uid,
        attempt=attempt.index,
        seed=attempt.seed,
        transcript=(),
        finish_reason=None if void else FinishReason.DONE,
        report=None if void else CheckReport(outcome == 1, "scripted"),
        reward=None if void else float(outcome),
        fault=Fault("tool", "the tool broke.") if void else None,
        seconds={},
        usage={},
    )
    tokens_t = np.zeros(3, np.int32)
    mask_t, logp_t = np.ones(3, bool), np.zeros(3, np.float32)
    trajectory = Trajectory(attempt.uid, attempt.index, episode.reward or 0.0, False, tokens_t, mask_t, logp_t)
    return Rollout(episode, None if void else trajectory)


class Script:
    """Rolls attempts with the outcomes of `outcomes(uid, member, how often it was tried before)`."""

    def __init__(self, outcomes):
        self.outcomes, self.tried, self.seeds = outcomes, {}, []

    def __call__(self, attempts):
        made = []
        for attempt in attempts:
            key = (attempt.uid, attempt.index)
            made.append(rollout(attempt, self.outcomes(*key, self.tried.get(key, 0))))
            self.tried[key] = self.tried.get(key, 0) + 1
            self.seeds.append(attempt.seed)
        return reversed(made)  # any order is right


def collect(script, step=1, position=0, **changes):
    algo = ALGO.model_copy(update={"group_size": 4, "groups_per_update": 2, "groups_rolled": 3, **changes})
    return collect_groups(script, TaskPlan(UIDS, 0), position, algo=algo, seed=0, step=step)


def test_a_void_member_is_refilled_on_the_same_task_and_never_moves_the_baseline():
    outcomes = [1, 0, 1, None]
    script = Script(lambda uid, member, tries: outcomes[member] if not tries else 0)
    collected = collect(script)
    assert collected.num_voids == 3 and collected.set_aside == ()
    for group in collected.groups:
        assert group.reward_g.tolist() == [1, 0, 1, 0]
        assert [member.episode.attempt for member in group.members] == [0, 1, 2, 3]
        advantage_g = group_advantages(group.reward_g, normalize_by_std=False)
        assert advantage_g.tolist() == [0.5, -0.5, 0.5, -0.5]
    assert len(set(script.seeds)) == len(script.seeds)  # a retry has a fresh seed


def test_groups_with_equal_outcomes_are_replaced_by_the_next_tasks_of_the_plan():
    easy = set(ORDER[:3])
    collected = collect(Script(lambda uid, member, tries: 1 if uid in easy else member % 2))
    assert [group.uid for group in collected.groups] == list(ORDER[3:5])
    assert (collected.num_rounds, collected.num_replaced, collected.position) == (2, 3, 6)
    assert [group.uid for group in collected.rolled] == list(ORDER[:6])


def test_mixed_groups_beyond_the_size_of_an_update_are_dropped_by_their_place_in_the_plan():
    # The third group has the best mix of outcomes and is dropped all the same.
    best = ORDER[2]
    collected = collect(Script(lambda uid, member, tries: int(member < (2 if uid == best else 1))))
    assert [group.uid for group in collected.groups] == list(ORDER[:2])
    assert collected.num_mixed == 3


def test_an_update_goes_on_with_what_it_has_after_the_last_round():
    lucky = ORDER[4]
    collected = collect(Script(lambda uid, member, tries: int(uid == lucky and member == 0)), max_rounds=2)
    assert [group.uid for group in collected.groups] == [lucky]
    assert collected.num_rounds == 2


def test_a_task_that_always_breaks_is_set_aside_and_does_not_block():
    broken = ORDER[1]
    script = Script(lambda uid, member, tries: None if uid == broken else member % 2)
    collected = collect(script, max_void_retries=2)
    assert collected.set_aside == (broken,)
    assert broken not in [group.uid for group in collected.rolled]
    assert len(collected.groups) == 2
    assert collected.num_voids == 4 * 3
    assert max(script.tried.values()) == 3


def test_the_run_stops_with_the_first_fault_when_most_attempts_break():
    script = Script(lambda uid, member, tries: None if member else 1)
    with pytest.raises(EnvironmentFault, match=r"9 of 12 .*9 tool.*the tool broke"):
        collect(script)


def test_attempts_are_the_same_from_the_same_position_and_different_at_another_step():
    def seeds(**kwargs):
        script = Script(lambda uid, member, tries: member % 2)
        collect(script, **kwargs)
        return script.seeds

    assert seeds(step=4, position=6) == seeds(step=4, position=6)
    assert not set(seeds(step=4, position=6)) & set(seeds(step=5, position=6))


def test_a_pool_smaller_than_a_round_gives_each_of_its_tasks_once_a_round():
    plan = TaskPlan(UIDS[:2], 0)
    algo = ALGO.model_copy(update={"group_size": 4, "groups_rolled": 3, "groups_per_update": 3, "max_rounds": 2})
    collected = collect_groups(Script(lambda uid, member, tries: member % 2), plan, 0, algo=algo, seed=0, step=1)
    assert sorted(group.uid for group in collected.groups[:2]) == list(UIDS[:2])
    assert collected.num_rounds == 2


def test_a_group_record_cannot_be_changed():
    group = collect(Script(lambda uid, member, tries: member % 2)).groups[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.uid = "other"
