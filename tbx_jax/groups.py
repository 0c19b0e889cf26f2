"""Collecting the groups of one update: roll, refill void members, replace groups without signal.

A group is complete before anything is computed from it: a void member (something of ours broke) is attempted
again on the same task with a fresh seed, so that it never moves the baseline and never counts as a failure. A
group whose attempts all ended alike says nothing about what to do differently; it is replaced by the plan's
next task (dynamic sampling, DAPO section 3.2, https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float32

from tbx_envs.agents import Attempt
from tbx_envs.errors import EnvironmentFault
from tbx_envs.seeding import derive
from tbx_jax.advantages import group_has_signal
from tbx_jax.config import AlgoConfig
from tbx_jax.plan import TaskPlan
from tbx_jax.rollout import Rollout

# Above this share of void first attempts in a round it is not a task that fails but what all of them stand
# on.
VOID_SHARE_LIMIT = 0.5

Roll = Callable[[Sequence[Attempt]], Iterable[Rollout]]


@dataclasses.dataclass(frozen=True)
class Group:
    """All attempts at one task, none of them void.

    Attributes:
        uid: of the task.
        members: by number of the attempt.
    """

    uid: str
    members: tuple[Rollout, ...]

    @property
    def passed_g(self) -> Bool[np.ndarray, "g"]:
        return np.array([member.episode.passed for member in self.members], bool)

    @property
    def reward_g(self) -> Float32[np.ndarray, "g"]:
        return np.array([member.episode.reward for member in self.members], np.float32)


@dataclasses.dataclass(frozen=True)
class Collected:
    """What was rolled for one update.

    Attributes:
        groups: to train on, in the order of the plan: all with mixed outcomes, at most `groups_per_update`.
        rolled: every complete group, those without signal included: what success rates are taken from.
        num_mixed: complete groups with mixed outcomes; those beyond `groups_per_update` are not trained on.
        num_rounds: how often tasks were taken from the plan.
        num_voids: void attempts, retries included.
        set_aside: tasks with a member that stayed void after all retries; reported and passed over this time.
        position: of the plan, after the last task taken.
    """

    groups: tuple[Group, ...]
    rolled: tuple[Group, ...]
    num_mixed: int
    num_rounds: int
    num_voids: int
    set_aside: tuple[str, ...]
    position: int

    @property
    def num_replaced(self) -> int:
        """Groups that carried no signal."""
        return len(self.rolled) - self.num_mixed


def collect_groups(roll: Roll, plan: TaskPlan, position: int, *, algo: AlgoConfig, seed: int, step: int) -> Collected:
    """Rolls rounds of groups until `groups_per_update` of them have mixed outcomes, or `max_rounds` were
    rolled.

    A round always rolls `groups_rolled` groups, since the sampler's slots cost the same empty. Mixed groups
    beyond `groups_per_update` are dropped, latest in the plan first and never by their outcome: an update
    then has a stated size, and learning curves of different seeds compare.

    Args:
        roll: makes attempts and gives a rollout for each, in any order.
        plan: which tasks, in which order.
        position: in the plan, where this update begins.
        algo: sizes and bounds.
        seed: of the run; every attempt's seed follows from it, the step, the round and the member.
        step: of the update.

    Raises:
        EnvironmentFault: more than `VOID_SHARE_LIMIT` of a round's attempts were void.
    """
    rolled: list[Group] = []
    mixed: list[Group] = []
    set_aside: list[str] = []
    num_rounds = num_voids = 0
    while len(mixed) < algo.groups_per_update and num_rounds < algo.max_rounds:
        uids, position = plan.take(position, algo.groups_rolled)
        complete, void_episodes, given_up = _roll_round(
            roll, uids, algo=algo, seed=derive(seed, "round", step, num_rounds)
        )
        num_rounds += 1
        num_voids += void_episodes
        set_aside += given_up
        rolled += complete
        mixed += [group for group in complete if group_has_signal(group.passed_g)]
    return Collected(
        groups=tuple(mixed[: algo.groups_per_update]),
        rolled=tuple(rolled),
        num_mixed=len(mixed),
        num_rounds=num_rounds,
        num_voids=num_voids,
        set_aside=tuple(set_aside),
        position=position,
    )


def _roll_round(roll: Roll, uids: Sequence[str], *, algo: AlgoConfig, seed: int) -> tuple[list[Group], int, list[str]]:
    """Complete groups in the order of `uids`, the number of void attempts, and tasks given up."""
    clean: dict[tuple[str, int], Rollout] = {}
    missing = [(uid, member) for uid in uids for member in range(algo.group_size)]
    num_voids = 0
    for retry in range(1 + algo.max_void_retries):
        attempts = [
            Attempt(uid=uid, index=member, seed=derive(seed, "attempt", uid, member, retry)) for uid, member in missing
        ]
        rollouts = list(roll(attempts)) if attempts else []
        voids = [rollout for rollout in rollouts if rollout.episode.fault is not None]
        num_voids += len(voids)
        if retry == 0:
            _stop_when_everything_breaks(voids, len(attempts))
        clean |= {
            (rollout.episode.uid, rollout.episode.attempt): rollout
            for rollout in rollouts
            if rollout.episode.fault is None
        }
        missing = [key for key in missing if key not in clean]
    given_up = {uid for uid, _ in missing}
    complete = [
        Group(uid, tuple(clean[uid, member] for member in range(algo.group_size)))
        for uid in uids
        if uid not in given_up
    ]
    return complete, num_voids, [uid for uid in uids if uid in given_up]


def _stop_when_everything_breaks(voids: Sequence[Rollout], num_attempts: int) -> None:
    if len(voids) <= VOID_SHARE_LIMIT * num_attempts:
        return
    faults = [rollout.episode.fault for rollout in voids if rollout.episode.fault is not None]
    kinds = collections.Counter(fault.kind for fault in faults)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    raise EnvironmentFault(
        f"{len(voids)} of {num_attempts} attempts of a round were void ({counts}), more than "
        f"{VOID_SHARE_LIMIT:.0%}: what all tasks stand on is broken. First fault: {faults[0].message} "
        f"Mend it and run the same command again: training goes on from its last checkpoint."
    )
