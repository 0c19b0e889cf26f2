"""The order of tasks: an endless sequence that is a function of the seed, read from a position.

Each epoch goes through the whole pool once, in its own shuffled order. The position is saved in the checkpoint, so a
resumed run takes the same tasks as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses

from tbx_envs.errors import ConfigError
from tbx_envs.seeding import rng


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """The pool and the seed of its order.

    Attributes:
        uids: ids of the tasks to train on, all different.
        seed: seed of the run.
    """

    uids: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if not self.uids:
            raise ConfigError("a plan over 0 tasks; give `tasks` or `pool` at least one task.")
        if len(set(self.uids)) != len(self.uids):
            twice = sorted({uid for uid in self.uids if self.uids.count(uid) > 1})
            raise ConfigError(
                f"{len(twice)} task(s) are in the pool more than once: {', '.join(twice[:5])}. List each of them once."
            )

    def take(self, position: int, count: int) -> tuple[tuple[str, ...], int]:
        """The next `count` tasks from `position`, all different, and the position after them.

        When an epoch ends among them, tasks of the next epoch that are already taken are skipped. A pool with fewer
        than `count` tasks gives all of them.
        """
        taken: list[str] = []
        while len(taken) < min(count, len(self.uids)):
            uid = self._at(position)
            position += 1
            if uid not in taken:
                taken.append(uid)
        return tuple(taken), position

    def _at(self, position: int) -> str:
        epoch, index = divmod(position, len(self.uids))
        return self._epoch(epoch)[index]

    def _epoch(self, epoch: int) -> list[str]:
        order = sorted(self.uids)  # independent of the order in the pool's file
        rng(self.seed, "plan", epoch).shuffle(order)
        return order
