"""The idle policy ends at once: a task that it passes rewards doing nothing, and must say why that is
right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.turns import play_turns
from tbx_envs.domains import AgentTurns
from tbx_envs.episode import Episode
from tbx_envs.messages import DONE_MARK, Turn


class IdleAgent:
    """Does nothing.

    Args:
        concurrency: how many episodes run at the same time (`play_turns`).
        env_options: of every `ToolEnv`.
    """

    def __init__(self, *, concurrency: int = 1, **env_options: Any) -> None:
        self._options = {"concurrency": concurrency, **env_options}

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt."""
        return play_turns(attempts, _agent, **self._options)


def _agent(attempt: Attempt, opening: Opening) -> AgentTurns:
    yield Turn(text=DONE_MARK)
