"""What one episode stands on: its opening, its tools, its user and its check.

`ToolEnv` knows the course of an episode and nothing else. Where tools run and what is compared at the end is the
runtime's business, and a task's source makes it. There are two kinds of source: our own domains
(`tbx_envs.domains.runtime`) and ThinkingBox datasets on other people's servers (`tbx_envs.thinkingbox.runtime`);
`tbx_envs.sources.source_of` finds the one that a uid belongs to.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tbx_envs.endpoints.costs import TokenUsage, usage_counts
from tbx_envs.episode import CheckReport, Episode
from tbx_envs.errors import ActionError, did_you_mean
from tbx_envs.messages import Message, Transcript
from tbx_envs.task import AnyTask
from tbx_envs.tools.session import Answer
from tbx_envs.users import User

if TYPE_CHECKING:  # a judge is an option of tasks that most processes never play
    from tbx_envs.thinkingbox.grading.judge import Judge

# Makes the user of an episode from (task, domain, seed); the domain is None for a dataset's task. None: no user
# answers after the first message.
UserMaker = Callable[[Any, Any, int], User | None]


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How episodes are set up. The configuration, or the keyword arguments of `ToolEnv`, become this record once.

    Attributes:
        chat_format: how calls are written in the policy's text (`tbx_envs.chat.interpretation`).
        user: maker of the simulated user of each episode; None is the scripted user for our own domains and no user
            for a dataset's tasks.
        tool_timeout_s: time limit of one call, after which the episode is void; None is 10 s for our own domains and
            60 s for other people's servers.
        judge: what answers the questions that some checks of datasets ask: `none`, `yes` (everything is right), or a
            `tbx_envs.thinkingbox.grading.judge.Judge`.
        start: how a dataset's server processes start: `fork` from a process that has imported them once, or `spawn`.
        clock: moment that the clock of a dataset's servers shows; None is the real one. A task's own clock goes first.
        clock_runs: True for a clock that goes on from that moment, False for one that stands still.
        check_timeout_s: time limit of the code of a dataset's check.

    Raises:
        ActionError: another `start`, or a clock that is not a moment.
    """

    chat_format: str = "hermes"
    user: UserMaker | None = None
    tool_timeout_s: float | None = None
    judge: Judge | str | None = "none"
    start: Literal["fork", "spawn"] = "fork"
    clock: datetime.datetime | None = None
    clock_runs: bool = False
    check_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.start not in ("fork", "spawn"):
            raise ActionError(f"start={self.start!r}: the servers of a dataset start by 'fork' or by 'spawn'.")
        if not isinstance(self.clock, datetime.datetime | None):
            raise ActionError(
                f"clock={self.clock!r}: give a datetime.datetime, such as datetime.datetime(2025, 10, 1, 13)."
            )

    def changed(self, given: Mapping[str, Any]) -> EpisodeOptions:
        """These options with some of them replaced, by name.

        Raises:
            ActionError: there is no such option.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in given:
            if name not in known:
                raise ActionError(
                    f"ToolEnv has no option {name!r}.{did_you_mean(name, known)} Its options: {', '.join(known)}."
                )
        return dataclasses.replace(self, **given)


class Runtime(Protocol):
    """Set up for one episode. Every method but `close` and `discard` raises `EnvironmentFault` when something broke.

    Attributes:
        opening: messages before the policy's first turn, the user's first message last.
        user: who answers; None for no one.
        user_turns: most answers of the user.
        user_may_end: True when a user's message that ends with `<DONE>` ends the episode.
        ends_turn: names of tools that are not executed: a call of one ends the episode.
    """

    opening: tuple[Message, ...]
    user: User | None
    user_turns: int
    user_may_end: bool
    ends_turn: frozenset[str]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI-function style dictionaries in the order in which the policy reads them, new objects each time."""
        ...

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
        """The verdict of the check."""
        ...

    def close(self) -> None:
        """Give everything back after a clean episode, or one that was left. Never raises."""
        ...

    def discard(self, kind: str) -> None:
        """Throw away what a fault of that kind may have left in an unknown state. Never raises."""
        ...


class TaskSource(Protocol):
    """What knows a task's uid: finds the task, starts its episodes, and answers what depends on its kind.

    Attributes:
        waits: True when a step mostly waits for other processes, so that many are best taken at the same time.
    """

    waits: bool

    def task(self, uid: str) -> AnyTask:
        """The task of that uid.

        Raises:
            DomainError: there is none, or its files are wrong.
        """
        ...

    def require(self, uid: str) -> None:
        """As `task`, but the task need not be built.

        Raises:
            DomainError: there is no such task.
        """
        ...

    def tools(self, task: AnyTask) -> list[dict[str, Any]] | None:
        """The tools of a task that has no episode yet, new objects each time; None where only its servers know."""
        ...

    def start(self, task: AnyTask, options: EpisodeOptions, seed: int) -> Runtime:
        """A runtime for one episode.

        Raises:
            EnvironmentFault: something broke while it was set up.
            DomainError: the task itself is wrong.
            ConfigError: the options name what does not exist.
        """
        ...

    def grade_again(
        self, task: AnyTask, episode: Episode, options: EpisodeOptions
    ) -> tuple[CheckReport, dict[str, int]]:
        """The verdict of today's check on a saved episode, and the judge's tokens.

        Raises:
            CheckFault: the check failed, or the episode cannot be graded again.
        """
        ...

    def task_hash(self, task: AnyTask) -> str:
        """SHA-256 (hex) over the task and everything of its source that an agent reads."""
        ...

    def is_heldout_family(self, task: AnyTask) -> bool:
        """True when no task of the task's family is for training."""
        ...


def user_usage(user: User | None) -> dict[str, int]:
    """The tokens of a user that a served model plays; empty for others."""
    usage = getattr(user, "usage", None)
    return usage_counts(usage, "user") if isinstance(usage, TokenUsage) else {}
