"""A stage is what one episode stands on: what is said at its beginning, its tools, its user and its check.

`ToolEnv` knows the course of an episode and nothing else; where tools run and what is compared at the end is the
stage's business. There are two: tasks of our own domains (`tbx_envs.domains.runtime`) and tasks of ThinkingBox
datasets on other people's servers (`tbx_envs.thinkingbox.runtime`).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from tbx_envs.endpoints.costs import TokenUsage, usage_counts
from tbx_envs.episode import CheckReport
from tbx_envs.errors import ActionError
from tbx_envs.messages import Message, Transcript
from tbx_envs.tools.session import Answer
from tbx_envs.users import User

# Makes the user of an episode from (task, domain, seed); the domain is None for a dataset's task. None: there is no
# user after the first message.
UserMaker = Callable[[Any, Any, int], User | None]


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How stages are set up; the defaults are those of `ToolEnv`.

    Attributes:
        user: makes the simulated user of each episode; None is the scripted user for our own domains and nobody for
            a dataset's tasks.
        tool_timeout_s: how long one call may take before the episode is void; None is 10 s for our own domains and
            60 s for other people's servers.
        judge: who answers the questions that some checks of datasets ask: `none`, `yes` (everything is right), or a
            `tbx_envs.thinkingbox.grading.judge.Judge`.
        start: how a dataset's process servers begin: `fork` from a process that has imported them once, or `spawn`.
        clock: the moment that the clock of a dataset's servers shows; None is the real one. A task's own goes first.
        clock_runs: the clock goes on from that moment; otherwise it stands still.
        check_timeout_s: how long the code of a dataset's check may run.

    Raises:
        ActionError: another way to begin, or a clock that is no moment.
    """

    user: UserMaker | None = None
    tool_timeout_s: float | None = None
    judge: Any = "none"
    start: Literal["fork", "spawn"] = "fork"
    clock: datetime.datetime | None = None
    clock_runs: bool = False
    check_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.start not in ("fork", "spawn"):
            raise ActionError(f"start={self.start!r}: a dataset's servers begin by 'fork' or by 'spawn'.")
        if not isinstance(self.clock, datetime.datetime | None):
            raise ActionError(
                f"clock={self.clock!r}: give a datetime.datetime, such as datetime.datetime(2025, 10, 1, 13)."
            )


class Runtime(Protocol):
    """Set up for one episode. Every method but `close` and `discard` raises `EnvironmentFault` when something broke.

    Attributes:
        opening: what is said before the policy's first turn, the user's first message last.
        tools: as OpenAI-function style dictionaries, in the order in which the policy reads them.
        user: who answers; None: nobody does.
        user_turns: how often the user answers at most.
        user_may_end: a user's message that ends with `<DONE>` ends the episode.
        ends_turn: tools that are not executed: a call of one ends the episode.
    """

    opening: tuple[Message, ...]
    tools: list[dict[str, Any]]
    user: User | None
    user_turns: int
    user_may_end: bool
    ends_turn: frozenset[str]

    def call(self, name: Any, arguments: Any) -> Answer:
        """The answer to one call; sent once, never again."""
        ...

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far of served models that play the user or judge, as counts for `Episode.usage`."""
        ...

    def evidence(self, transcript: Transcript) -> Mapping[str, Any] | None:
        """What the check needs beyond the transcript, so that it can be repeated (`Episode.evidence`); None where it
        looks at a live world."""
        ...

    def check(self, transcript: Transcript, evidence: Mapping[str, Any] | None) -> CheckReport:
        """What the check says."""
        ...

    def close(self) -> None:
        """After a clean episode, or one that was left: give everything back. Never raises."""
        ...

    def discard(self, kind: str) -> None:
        """After a fault of that kind: what may be in an unknown state is never used again. Never raises."""
        ...


def user_usage(user: User | None) -> dict[str, int]:
    """The tokens of a user that a served model plays; nothing for others."""
    usage = getattr(user, "usage", None)
    return usage_counts(usage, "user") if isinstance(usage, TokenUsage) else {}
