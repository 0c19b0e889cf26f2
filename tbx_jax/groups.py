"""Collecting the groups of one update: roll out attempts, repeat void ones, replace groups without signal.

A group is complete before it is used: a void member (an infrastructure error) is repeated on the same task with a new
seed, so it never affects the baseline and never counts as a failure. A group whose attempts all have the same outcome
has no gradient; it is replaced by a group of the plan's next task (dynamic sampling, DAPO section 3.2,
https://arxiv.org/abs/2503.14476).
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

# Above this share of void first attempts in a round the infrastructure of all tasks is broken, not a single task.
VOID_SHARE_LIMIT = 0.5

Roll = Callable[[Sequence[Attempt]], Iterable[Rollout]]


@dataclasses.dataclass(frozen=True)
class Group:
    """All attempts at one task, none of them void.

    Attributes:
        uid: task id.
        members: rollout of each attempt, by its index.
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
    """The groups rolled out for one update.

    Attributes:
        groups: groups to train on, in the order of the plan: all with mixed outcomes, at most `groups_per_update`.
        rolled: all complete groups, with those without signal; success rates are computed from these.
        num_mixed: number of complete groups with mixed outcomes; those beyond `groups_per_update` are not trained on.
        num_rounds: number of rounds of tasks taken from the plan.
        num_voids: number of void attempts, retries included.
        set_aside: tasks with a member that was void after all retries; reported and skipped in this update.
        position: position in the plan after the last task taken.
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
        """Number of groups without signal."""
        return len(self.rolled) - self.num_mixed


def collect_groups(roll: Roll, plan: TaskPlan, position: int, *, algo: AlgoConfig, seed: int, step: int) -> Collected:
    """Rolls out rounds of groups until `groups_per_update` have mixed outcomes, `max_rounds` rounds at most.

    Every round has `groups_rolled` groups, since an idle cache row costs the sampler as much as a busy one. Mixed
    groups beyond `groups_per_update` are dropped, latest in the plan first and never by their outcome: so updates have
    a fixed size, and learning curves of different seeds are comparable.

    Args:
        roll: function that runs attempts and yields a rollout of each, in any order.
        plan: order of the tasks.
        position: position in the plan where this update starts.
        algo: sizes and limits.
        seed: seed of the run; every attempt's seed is derived from it, the step, the round and the member.
        step: number of the update.

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
    """Complete groups in the order of `uids`, the number of void attempts, and the tasks without a complete group."""
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
        f"{VOID_SHARE_LIMIT:.0%}: the infrastructure of all tasks is broken. First fault: {faults[0].message} "
        f"Fix it and run the same command again: training resumes from its last checkpoint."
    )
