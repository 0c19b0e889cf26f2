"""Episode: the record of one attempt at a task, complete enough to look at and to grade again."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from tbx_envs.messages import Transcript


class FinishReason(enum.StrEnum):
    """Why an episode ended. The check runs at every end; only a fault leaves an episode without a reward."""

    DONE = "done"  # the agent's message ended with <DONE>
    USER_DONE = "user_done"  # the user ended the conversation
    USER_LIMIT = "user_limit"  # the user has answered as often as the task allows
    AGENT_LIMIT = "agent_limit"  # the policy has written as many turns as the task allows
    TRUNCATED = "truncated"  # a turn was cut off by a token limit


# Ends that the task itself knows (`terminated`); the others are bounds put on it (`truncated`).
TERMINATED = frozenset({FinishReason.DONE, FinishReason.USER_DONE})


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """What the check saw.

    Attributes:
        passed: the verdict; the reward is 1.0 or 0.0 by it.
        check: name of the check (`state`).
        differences: readable lines, one per row that is not as expected; empty when passed.
    """

    passed: bool
    check: str
    differences: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Something of ours broke.

    Attributes:
        kind: `kind` of the `EnvironmentFault` (`tool`, `user`, `check`, `policy`, `environment`).
        message: its text.
    """

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task. Either `report` and `reward` are there, or `fault` is: then the episode is void.

    Attributes:
        uid: of the task.
        attempt: number of the attempt at this task, from 0.
        seed: given to `reset`.
        transcript: everything said.
        finish_reason: None for a void episode.
        report: the check's report, None for a void episode.
        reward: 1.0 or 0.0, None for a void episode.
        fault: None, or what broke.
        seconds: wall time by part: `environment` (tools, user and check), `policy` where known.
        usage: counts such as `agent_turns`, `tool_calls`, `sampled_tokens`, `given_tokens` where known.
    """

    uid: str
    attempt: int
    seed: int
    transcript: Transcript
    finish_reason: FinishReason | None
    report: CheckReport | None
    reward: float | None
    fault: Fault | None
    seconds: Mapping[str, float]
    usage: Mapping[str, int]

    @property
    def passed(self) -> bool | None:
        return None if self.reward is None else self.reward == 1.0
