"""The idle agent ends at once. A task that it passes rewards doing nothing, and must say why that is right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.turns import play_turns
from tbx_envs.domains import AgentTurns
from tbx_envs.episode import Episode
from tbx_envs.messages import DONE_MARK, Turn
from tbx_envs.runtime import EpisodeOptions


class IdleAgent:
    """Does nothing.

    Args:
        concurrency: number of episodes that run at the same time (`play_turns`).
        options: options of every episode; None is the defaults.
    """

    def __init__(self, *, concurrency: int = 1, options: EpisodeOptions | None = None) -> None:
        self._concurrency = concurrency
        self._options = options

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt."""
        return play_turns(attempts, _agent, concurrency=self._concurrency, options=self._options)


def _agent(attempt: Attempt, opening: Opening) -> AgentTurns:
    yield Turn(text=DONE_MARK)
