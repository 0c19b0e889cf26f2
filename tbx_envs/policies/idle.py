"""The idle policy ends at once: a task that it passes rewards doing nothing, and must say why that is
right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.domains import ScriptedAgent
from tbx_envs.episode import Episode
from tbx_envs.messages import DONE_MARK, Turn
from tbx_envs.policies import Attempt
from tbx_envs.policies.turns import play_turns
from tbx_envs.task import Task


class IdlePlayer:
    """Does nothing."""

    def play(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in order."""
        return play_turns(attempts, _agent)


def _agent(task: Task, attempt: Attempt) -> ScriptedAgent:
    yield Turn(text=DONE_MARK)
