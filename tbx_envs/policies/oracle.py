"""The oracle makes the task's expected calls, one a turn, and ends: every task must pass it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.domains import ScriptedAgent
from tbx_envs.episode import Episode
from tbx_envs.messages import DONE_MARK, ToolCall, Turn
from tbx_envs.policies import Attempt
from tbx_envs.policies.turns import play_turns
from tbx_envs.task import Task


class OraclePlayer:
    """Knows the expected calls. It never speaks to the user."""

    def play(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in order."""
        return play_turns(attempts, _agent)


def _agent(task: Task, attempt: Attempt) -> ScriptedAgent:
    for number, call in enumerate(task.expected_calls):
        yield Turn(calls=(ToolCall(f"call_{number}", call.tool, call.arguments),))
    yield Turn(text=DONE_MARK)
