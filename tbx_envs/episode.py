"""The record of one attempt at a task, complete enough to inspect and to grade again."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

from tbx_envs.doors import clean_text, shown
from tbx_envs.messages import Transcript


class FinishReason(enum.StrEnum):
    """Why an episode ended. The check runs at every end; only a fault leaves an episode without a reward."""

    DONE = "done"  # the agent's message ended with <DONE>
    USER_DONE = "user_done"  # the user ended the conversation
    USER_LIMIT = "user_limit"  # the user has answered as often as the task allows
    AGENT_LIMIT = "agent_limit"  # the agent has acted as often as the task allows
    TRUNCATED = "truncated"  # a turn was cut off by a token limit
    END_TURN_TOOL = "end_turn_tool"  # the agent called a tool that ends the conversation
    NO_USER = "no_user_llm"  # the agent spoke to the user, and the episode has none


# The task's own ends (`terminated`); the others are limits (`truncated`).
TERMINATED = frozenset({FinishReason.DONE, FinishReason.USER_DONE, FinishReason.END_TURN_TOOL})


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """The verdict of a check and its reasons.

    Attributes:
        passed: verdict.
        check: name of the check (`state`, `test_code`).
        differences: readable lines, one per row that is not as expected, or the message of a failed assertion; empty
            when passed.
        score: reward in [0, 1] of a check that grades more finely than yes or no; None: 1.0 or 0.0 by `passed`.
        notes: further lines for people: prints of the test, a judge's motivations.
    """

    passed: bool
    check: str
    differences: tuple[str, ...] = ()
    score: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def reward(self) -> float:
        return float(self.passed) if self.score is None else self.score


def entered_report(report: Any) -> CheckReport:
    """What a check returned, as a report that may be scored: the door by which verdicts and rewards enter.

    Raises:
        ValueError: it is no verdict; the message says what it is instead, as the rest of a sentence that starts with
            "the check returned".
    """
    if not isinstance(report, CheckReport):
        raise ValueError(f"{shown(report)}, which is no CheckReport")
    if not isinstance(report.passed, bool):
        raise ValueError(f"a report with passed={shown(report.passed)}, which is neither True nor False")
    return CheckReport(
        report.passed,
        _text("check", report.check),
        _lines("differences", report.differences),
        None if report.score is None else entered_score(report.score),
        _lines("notes", report.notes),
    )


def entered_score(score: Any) -> float:
    """A score as a number from 0 to 1.

    Raises:
        ValueError: it is none: a boolean, not a number, NaN, out of range.
    """
    if not isinstance(score, int | float) or isinstance(score, bool):
        raise ValueError(f"the score {shown(score)}, which is no number")
    if not (math.isfinite(score) and 0 <= score <= 1):
        raise ValueError(f"the score {shown(score)}, which is not from 0 to 1")
    return float(score)


def _lines(name: str, lines: Any) -> tuple[str, ...]:
    if not isinstance(lines, tuple | list):
        raise ValueError(f"a report with {name}={shown(lines)}, which is no tuple of texts")
    return tuple(_text(name, line) for line in lines)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a report with {shown(value)} in {name}, which is no text")
    return clean_text(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """The infrastructure error that voided an episode, as data (`tbx_envs.errors.EnvironmentFault`).

    Attributes:
        kind: `kind` of the `EnvironmentFault` (`tool`, `user`, `check`, `policy`, `environment`).
        message: text of the error.
    """

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task. It has either `report` and `reward`, or a `fault`, and then it is void.

    Attributes:
        uid: task id.
        attempt: number of the attempt at this task, from 0.
        seed: seed given to `reset`.
        transcript: all messages.
        finish_reason: reason of the end; None when a fault ended the episode before it had one.
        report: report of the check; None for a void episode.
        reward: 1.0 or 0.0 (or a check's finer score); None for a void episode.
        fault: infrastructure error that voided the episode; None for a clean one.
        seconds: wall time by part: `environment` (tools, user and check), `policy` where known.
        usage: counts such as `agent_turns`, `tool_calls`, `sampled_tokens`, `given_tokens` where known.
        evidence: input of the check beyond the transcript (JSON), so that the episode can be graded again; None where
            the check reads a live database.
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
