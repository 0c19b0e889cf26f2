"""The runtime of an episode: its opening, its tools, its user and its check; and where it comes from, a task's source.

`ToolEnv` implements the course of an episode and nothing else. Where tools run and what is compared at the end is up to
the runtime, which a task's source makes. There are two kinds of source: our own domains (`tbx_envs.domains.runtime`)
and ThinkingBox datasets on other people's servers (`tbx_envs.thinkingbox.runtime`); `tbx_envs.sources.source_of` finds
the one that a uid belongs to.
"""

from __future__ import annotations

import dataclasses
import datetime
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from tbx_envs.doors import shown
from tbx_envs.endpoints.costs import TokenUsage, usage_counts
from tbx_envs.episode import CheckReport, Episode
from tbx_envs.errors import ActionError, did_you_mean
from tbx_envs.messages import Message, Transcript
from tbx_envs.task import AnyTask
from tbx_envs.tools.session import Answer
from tbx_envs.users import User

if TYPE_CHECKING:  # the first imports this module; a judge is an option of tasks that most processes never run
    from tbx_envs.domains import Domain
    from tbx_envs.thinkingbox.grading.judge import Judge

# (task, domain, seed) -> user of an episode. The domain is None for a dataset's task. A user of None means that no one
# answers after the first message.
UserMaker = Callable[[AnyTask, "Domain | None", int], User | None]


class GivenOptions(TypedDict, total=False):
    """`EpisodeOptions` as keyword arguments, any of them, so that a type checker finds a misspelt one."""

    chat_format: str
    user: UserMaker | None
    tool_timeout_s: float | None
    user_timeout_s: float | None
    judge: Judge | str | None
    start: Literal["fork", "spawn"]
    clock: datetime.datetime | None
    clock_runs: bool
    check_timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """Options of an episode. A configuration, or the keyword arguments of `ToolEnv`, become this record once.

    Attributes:
        chat_format: syntax of calls in the agent's text (`tbx_envs.chat.interpretation`).
        user: maker of the simulated user of each episode; None is the scripted user for our own domains and no user
            for a dataset's tasks.
        tool_timeout_s: time limit of one call, after which the episode is void; None is 10 s for our own domains and
            60 s for other people's servers.
        user_timeout_s: time limit of one answer of the user, after which the episode is void; None is the user's own
            (`tbx_envs.users.User`).
        judge: answers the questions that some checks of datasets ask: `none`, `yes` (everything is right), or a
            `tbx_envs.thinkingbox.grading.judge.Judge`.
        start: start method of a dataset's server processes: `fork` from a process that has imported them once, or
            `spawn`.
        clock: time shown by the clock of a dataset's servers; None is the real time. A task's own clock takes
            precedence.
        clock_runs: True for a clock that runs from that time on, False for one that stands still.
        check_timeout_s: time limit of the code of a dataset's check.

    Raises:
        ActionError: a value that no episode could use, and for which every one would be void.
    """

    chat_format: str = "hermes"
    user: UserMaker | None = None
    tool_timeout_s: float | None = None
    user_timeout_s: float | None = None
    judge: Judge | str | None = "none"
    start: Literal["fork", "spawn"] = "fork"
    clock: datetime.datetime | None = None
    clock_runs: bool = False
    check_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, wanted in self._wrong():
            raise ActionError(f"{name}={shown(getattr(self, name))}: {wanted}.")

    def _wrong(self) -> Iterator[tuple[str, str]]:
        """Name of each option that has a wrong value, and what it should be."""
        if not isinstance(self.chat_format, str):
            yield "chat_format", "give the name of a format, such as 'hermes'"
        if self.user is not None and not callable(self.user):
            yield "user", "give a function (task, domain, seed) that makes the user, or None for the task's own"
        if not _is_time(self.check_timeout_s):
            yield "check_timeout_s", _TIME
        for name in ("tool_timeout_s", "user_timeout_s"):
            if getattr(self, name) is not None and not _is_time(getattr(self, name)):
                yield name, f"{_TIME}, or None"
        if self.start not in ("fork", "spawn"):
            yield "start", "the servers of a dataset start by 'fork' or by 'spawn'"
        if not isinstance(self.clock, datetime.datetime | None):
            yield "clock", "give a datetime.datetime, such as datetime.datetime(2025, 10, 1, 13)"
        if not isinstance(self.clock_runs, bool):
            yield "clock_runs", "give True or False"

    @classmethod
    def of(cls, options: EpisodeOptions | None, given: Mapping[str, Any]) -> EpisodeOptions:
        """The options, or the defaults for None, with those of `given` replaced.

        Raises:
            ActionError: `options` is something else, or no option has a name in `given`.
        """
        if options is not None and not isinstance(options, cls):
            raise ActionError(
                f"options={options!r}: wanted a tbx_envs.EpisodeOptions. Give it, or single options by name, such as "
                f"judge='yes'."
            )
        return (options or cls()).changed(given)

    def changed(self, given: Mapping[str, Any]) -> EpisodeOptions:
        """A copy with some options replaced.

        Args:
            given: name of an option -> new value.

        Raises:
            ActionError: no option has that name.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in given:
            if name not in known:
                raise ActionError(
                    f"ToolEnv has no option {name!r}.{did_you_mean(name, known)} Its options: {', '.join(known)}."
                )
        return dataclasses.replace(self, **given)


_TIME = "give a number of seconds above 0"


def _is_time(seconds: Any) -> bool:
    """True for a time that a thread can wait."""
    return isinstance(seconds, numbers.Real) and 0 < float(seconds) <= threading.TIMEOUT_MAX


class Runtime(Protocol):
    """What one episode runs on. Every method but `close` and `discard` raises `EnvironmentFault` on an infrastructure
    error.

    Attributes:
        opening: messages before the agent's first turn, the user's first message last.
        user: simulated user; None when no one answers.
        user_turns: maximum number of answers of the user.
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
        """The tools as OpenAI-function style dictionaries, in the order the agent reads them; new objects each time."""
        ...

    def call(self, name: Any, arguments: Any) -> Answer:
        """The answer to one call; the call is sent once and never repeated."""
        ...

    @property
    def usage(self) -> dict[str, int]:
        """Tokens used so far by served models as user or judge, as counts for `Episode.usage`."""
        ...

    def evidence(self, transcript: Transcript) -> Mapping[str, Any] | None:
        """What the check needs beyond the transcript, so that it can be repeated (`Episode.evidence`); None where the
        check reads a live database."""
        ...

    def check(self, transcript: Transcript, evidence: Mapping[str, Any] | None) -> CheckReport:
        """The verdict of the check."""
        ...

    def close(self) -> None:
        """Release everything after an episode that ended without a fault or was not finished. Never raises."""
        ...

    def discard(self, kind: str) -> None:
        """Destroy what a fault of that kind may have left in an unknown state. Never raises."""
        ...


class TaskSource(Protocol):
    """Where tasks come from: finds a task by its uid, starts its episodes, and answers what depends on its kind.

    Attributes:
        waits: True when a step mostly waits for other processes, so that several episodes are best stepped
            concurrently.
    """

    waits: bool

    def task(self, uid: str) -> AnyTask:
        """The task of that uid.

        Raises:
            DomainError: no task has that uid, or its files are wrong.
        """
        ...

    def require(self, uid: str) -> None:
        """Check that a task exists, without having to build it.

        Raises:
            DomainError: no task has that uid.
        """
        ...

    def tools(self, task: AnyTask) -> list[dict[str, Any]] | None:
        """The tools of a task before its first episode, new objects each time; None where only its servers know."""
        ...

    def start(self, task: AnyTask, options: EpisodeOptions, seed: int) -> Runtime:
        """A runtime for one episode.

        Raises:
            EnvironmentFault: infrastructure error while it was set up.
            DomainError: the task itself is wrong.
            ConfigError: the options name what does not exist.
        """
        ...

    def grade_again(
        self, task: AnyTask, episode: Episode, options: EpisodeOptions
    ) -> tuple[CheckReport, dict[str, int]]:
        """The report of the current check on a saved episode, and the judge's tokens.

        Raises:
            CheckFault: the check failed, or the episode cannot be graded again.
        """
        ...

    def task_hash(self, task: AnyTask) -> str:
        """SHA-256 (hex) over the task and all texts of its source that an agent reads."""
        ...

    def is_heldout_family(self, task: AnyTask) -> bool:
        """True when no task of the task's family is in the `train` split."""
        ...


def user_usage(user: User | None) -> dict[str, int]:
    """Token counts of a user that is a served model, and how often it said nothing, if it did; empty for others."""
    usage, silences = getattr(user, "usage", None), getattr(user, "silences", 0)
    tokens = usage_counts(usage, "user") if isinstance(usage, TokenUsage) else {}
    return tokens | ({"user_silences": silences} if isinstance(silences, int) and silences > 0 else {})
