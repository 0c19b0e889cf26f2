"""The oracle makes the task's expected calls, one per turn, and ends: it must pass every task that has some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.suited import no_solution, refuse_unsuited
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

    @staticmethod
    def refuse_unsuited(uids: Iterable[str]) -> None:
        """Refuse tasks that have no solution to make: it would be idle there, and its pass rate would say nothing.

        Raises:
            ConfigError: there are such tasks.
        """
        refuse_unsuited(uids, no_solution, "policy oracle makes a task's expected calls, and there are none")

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt.

        Raises:
            ConfigError: a task has no expected calls, and doing nothing is not right for it either.
        """
        return play_turns(attempts, _agent, concurrency=self._concurrency, options=self._options)


def _agent(attempt: Attempt, opening: Opening) -> AgentTurns:
    OracleAgent.refuse_unsuited([attempt.uid])
    for number, call in enumerate(opening.task.expected_calls):
        yield Turn(calls=(ToolCall(f"call_{number}", call.tool, call.arguments),))
    yield Turn(text=DONE_MARK)
