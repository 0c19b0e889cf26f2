"""Episode: the record of one attempt at a task, complete enough to look at and to grade again."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from tbx_envs.messages import Transcript


class FinishReason(enum.StrEnum):
    """Why an episode ended. The check runs at every end; only a fault leaves an episode without a reward."""

    DONE = "done"  # the agent's message ended with <DONE>
    USER_DONE = "user_done"  # the user ended the conversation
    USER_LIMIT = "user_limit"  # the user has answered as often as the task allows
    AGENT_LIMIT = "agent_limit"  # the policy has written as many turns as the task allows
    TRUNCATED = "truncated"  # a turn was cut off by a token limit
    END_TURN_TOOL = "end_turn_tool"  # the agent called a tool that ends the conversation
    NO_USER = "no_user_llm"  # the agent spoke to a user that there is not


# Ends that the task itself knows (`terminated`); the others are bounds put on it (`truncated`).
TERMINATED = frozenset({FinishReason.DONE, FinishReason.USER_DONE, FinishReason.END_TURN_TOOL})


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """What the check saw.

    Attributes:
        passed: the verdict.
        check: name of the check (`state`, `test_code`).
        differences: readable lines, one per row that is not as expected, or what an assertion said; empty when
            passed.
        score: the reward where a check grades more finely than yes or no, in [0, 1]; None: 1.0 or 0.0 by `passed`.
        notes: what else is worth keeping, for people: prints of the test, a judge's motivations.
    """

    passed: bool
    check: str
    differences: tuple[str, ...] = ()
    score: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def reward(self) -> float:
        return float(self.passed) if self.score is None else self.score


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
        finish_reason: None for an episode that a fault cut short; one whose check failed has its reason.
        report: the check's report, None for a void episode.
        reward: 1.0 or 0.0 (or a check's finer score), None for a void episode.
        fault: None, or what broke.
        seconds: wall time by part: `environment` (tools, user and check), `policy` where known.
        usage: counts such as `agent_turns`, `tool_calls`, `sampled_tokens`, `given_tokens` where known.
        evidence: what the check was given beyond the transcript (JSON), so that the episode can be graded again;
            None where the check needs a live world.
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
    evidence: Mapping[str, Any] | None = None

    @property
    def passed(self) -> bool | None:
        return None if self.report is None else self.report.passed
