"""The oracle makes the task's expected calls, one per turn, and ends: it must pass every task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.turns import play_turns
from tbx_envs.domains import AgentTurns
from tbx_envs.episode import Episode
from tbx_envs.messages import DONE_MARK, ToolCall, Turn
from tbx_envs.runtime import EpisodeOptions


class OracleAgent:
    """Makes the expected calls and never speaks to the user.

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
    for number, call in enumerate(opening.task.expected_calls):
        yield Turn(calls=(ToolCall(f"call_{number}", call.tool, call.arguments),))
    yield Turn(text=DONE_MARK)
