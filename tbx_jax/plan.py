"""The order of tasks: an endless list that is a function of the seed, read from a position.

Each epoch goes through the whole pool in a shuffled order of its own, without replacement. The position is a
number in the checkpoint, so a resumed run goes on exactly where the unbroken one would have.
"""

from __future__ import annotations

import dataclasses

from tbx_envs.errors import ConfigError
from tbx_envs.seeding import rng


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """The pool and the seed of its order.

    Attributes:
        uids: the tasks to train on, each once.
        seed: of the run.
    """

    uids: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if not self.uids:
            raise ConfigError("a plan over 0 tasks was asked for; give `tasks` or `pool` at least one task.")
        if len(set(self.uids)) != len(self.uids):
            twice = sorted({uid for uid in self.uids if self.uids.count(uid) > 1})
            raise ConfigError(
                f"{len(twice)} task(s) stand in the pool more than once: {', '.join(twice[:5])}. "
                f"List each of them once."
            )

    def take(self, position: int, count: int) -> tuple[tuple[str, ...], int]:
        """The next `count` tasks from `position` on, all different, and the position after them.

        Where an epoch ends within them, a task of the next epoch that is already among them is passed over. A
        pool with fewer than `count` tasks gives all of them.
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
        order = sorted(self.uids)  # the same order whatever the order of the pool's file
        rng(self.seed, "plan", epoch).shuffle(order)
        return order
