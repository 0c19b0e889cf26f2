"""The runtime of a ThinkingBox dataset's task: its servers in processes of their own, its check in a warm worker.

Server pools and check workers are shared by all episodes of a process and made when they are first needed. A forked
process makes its own.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tbx_envs.doors import shown, words_of
from tbx_envs.endpoints.costs import usage_counts
from tbx_envs.episode import CheckReport, Episode
from tbx_envs.errors import CheckFault, ConfigError, DomainError, UserFault
from tbx_envs.messages import Message, Text, ToolCall, Transcript, Turn
from tbx_envs.runtime import EpisodeOptions, user_usage
from tbx_envs.task import AnyTask
from tbx_envs.thinkingbox.agent_tools import AgentTools
from tbx_envs.thinkingbox.dataset import Dataset, dataset_of
from tbx_envs.thinkingbox.dataset.records import DatasetTask, content_hash
from tbx_envs.thinkingbox.grading.evidence import evidence_of
from tbx_envs.thinkingbox.grading.judge import EndpointJudge, Judge, YesJudge
from tbx_envs.thinkingbox.grading.test_code import CheckWorker
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.thinkingbox.servers.servers_file import load_servers, require_servers
from tbx_envs.tools.session import Answer, ServerSession
from tbx_envs.users import User

_TIMEOUT_S = 60.0


class DatasetSource:
    """The tasks of all registered datasets (`tbx_envs.runtime.TaskSource`)."""

    waits = True

    def task(self, uid: str) -> DatasetTask:
        return dataset_of(uid).task(uid)

    def require(self, uid: str) -> None:
        dataset_of(uid)

    def tools(self, task: AnyTask) -> None:
        return None

    def start(self, task: AnyTask, options: EpisodeOptions, seed: int) -> DatasetRuntime:
        return DatasetRuntime(_of_dataset(task), options, seed)

    def grade_again(
        self, task: AnyTask, episode: Episode, options: EpisodeOptions
    ) -> tuple[CheckReport, dict[str, int]]:
        """The report of the task's test on the saved evidence: only the test runs again."""
        if episode.evidence is None:
            raise CheckFault(
                f"task {episode.uid}: the episode was saved without evidence, so it cannot be graded again."
            )
        judge = judge_of(options.judge)
        report = grade(_of_dataset(task), episode.transcript, episode.evidence, judge, options.check_timeout_s)
        return report, judge_usage(judge)

    def task_hash(self, task: AnyTask) -> str:
        """Hash of the task alone: its servers are programs of other people."""
        return content_hash(_of_dataset(task))

    def is_heldout_family(self, task: AnyTask) -> bool:
        return task.split == "heldout"


def _of_dataset(task: AnyTask) -> DatasetTask:
    assert isinstance(task, DatasetTask), f"{task.uid} is not a task of a dataset"
    return task


class DatasetRuntime:
    """The runtime of a dataset's task (`tbx_envs.runtime.Runtime`).

    Raises:
        EnvironmentFault: a server did not start, or the user could not be made.
        DomainError: the task asks for something that does not exist.
        ConfigError: no such judge, or the dataset has no servers file.
    """

    def __init__(self, task: DatasetTask, options: EpisodeOptions, seed: int) -> None:
        self._task = task
        self._judge = judge_of(options.judge)
        self._check_timeout_s = options.check_timeout_s
        own = task.clock is not None
        pool = _pool(dataset_of(task.uid), options)
        try:
            require_servers(pool.servers, task.servers)
        except ConfigError as error:
            raise DomainError(f"task {task.uid}: {error}") from error
        self._session = pool.open(
            task.init,
            servers=task.servers,
            clock=task.clock if own else options.clock,
            clock_runs=task.clock_runs if own else options.clock_runs,
        )
        try:
            self._tools = AgentTools(task, self._session)
            self.ends_turn = self._tools.ends_turn
            self._replay_warnings = _replay(task, self._tools)
            filled = _filled_in(task, self._session.init_result)
            self.user = _user(filled, options, seed)
        except BaseException:
            self._session.discard()
            raise
        self.opening: tuple[Message, ...] = _opening(filled)
        self.user_may_end: bool = getattr(self.user, "can_end", True)
        # A user that may end the conversation gets one more answer to do so.
        self.user_turns = task.limits.user_turns + self.user_may_end

    @property
    def tools(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self._tools.dicts)

    def call(self, name: Any, arguments: Any) -> Answer:
        return self._tools.call(name, arguments)

    @property
    def usage(self) -> dict[str, int]:
        return user_usage(self.user) | judge_usage(self._judge)

    def evidence(self, transcript: Transcript) -> Mapping[str, Any]:
        return {
            "effects": self._session.effects(),
            "init_result": dict(self._session.init_result),
            "session_id": _NO_SESSION_ID,
            "opening": len(self.opening),
            "ends_turn": sorted(self.ends_turn),
            "metadata": {"replay_warnings": self._replay_warnings} if self._replay_warnings else {},
        }

    def check(self, transcript: Transcript, evidence: Mapping[str, Any] | None) -> CheckReport:
        assert evidence is not None
        return grade(self._task, transcript, evidence, self._judge, self._check_timeout_s, self._session)

    def close(self) -> None:
        self._session.close()

    def discard(self, kind: str) -> None:
        self._session.discard()


# Sessions have no ids here; test code that reads one gets what the original gives outside a session.
_NO_SESSION_ID = "00000000-0000-0000-0000-000000000000"


def judge_usage(judge: Judge | None) -> dict[str, int]:
    """Token counts of a judge that is a served model; empty for others."""
    return usage_counts(judge.usage, "judge") if isinstance(judge, EndpointJudge) else {}


def judge_of(judge: Judge | str | None) -> Judge | None:
    """The judge that an option names, for one episode.

    Raises:
        ConfigError: no such judge.
    """
    match judge:
        case None | "none":
            return None
        case "yes":
            return YesJudge()
        case str():
            raise ConfigError(f"unknown judge '{judge}'. Give none, yes, or a judge made with an endpoint.")
    return judge.for_episode() if isinstance(judge, EndpointJudge) else judge


def grade(
    task: DatasetTask,
    transcript: Transcript,
    evidence: Mapping[str, Any],
    judge: Judge | None,
    timeout_s: float,
    session: ServerSession | None = None,
) -> CheckReport:
    """The report of the task's test.

    Args:
        task: task of the episode.
        transcript: all messages.
        evidence: input of the test beyond the transcript (`Episode.evidence`).
        judge: judge for tests that ask one; None when none is configured.
        timeout_s: time limit of the test.
        session: servers of the episode, for tests that call them; None when they have ended.

    Raises:
        CheckFault: the test crashed, took too long, or asked a judge although none is configured.
    """
    worker = _shared(("checks", timeout_s), lambda: CheckWorker(timeout_s=timeout_s))
    return worker.grade(
        task.test_code,
        evidence_of(transcript, **evidence),
        fixtures=task.fixtures,
        judge=judge,
        session=session,
        uid=task.uid,
    )


def _replay(task: DatasetTask, tools: AgentTools) -> list[str]:
    """Execute the calls of the history again, in order; returns a warning for each one that was invalid.

    Calls that could not be parsed the first time are `BadCall`s and were never executed.
    """
    builtin = {tool.name for tool in task.builtin_tools}
    warnings = []
    for turn in task.history:
        for call in turn.calls if isinstance(turn, Turn) else ():
            if isinstance(call, ToolCall) and call.name not in builtin:
                answer = tools.call(call.name, call.arguments)
                if answer.status == "invalid":
                    warnings.append(f"{call.name}({dict(call.arguments)!r}) was not executed again: {answer.text}")
    return warnings


def _filled_in(task: DatasetTask, init_result: Mapping[str, Any]) -> DatasetTask:
    """The task with the answers of its servers' init filled into its texts, where it asks for that."""
    if not task.format_query:
        return task
    own = task.test_instructions or ""
    rest = task.bot_instructions.removesuffix(own) if own else task.bot_instructions
    try:
        return dataclasses.replace(
            task,
            query=task.query.format(init=init_result),
            user_context=task.user_context.format(init=init_result) if task.user_context else task.user_context,
            bot_instructions=rest + own.format(init=init_result),
        )
    except (LookupError, ValueError, AttributeError) as error:
        raise DomainError(
            f"task {task.uid} ({task.path}, line {task.line}): its texts cannot be filled in with the answers of the "
            f"servers' init ({words_of(error)}), which are {shown(dict(init_result), 2000)}. Fix the texts."
        ) from error


def _opening(task: DatasetTask) -> tuple[Message, ...]:
    rules = [Text("system", text) for text in (task.system_instructions, task.bot_instructions) if text]
    return (*rules, *task.history, Text("user", task.query))


def _user(task: DatasetTask, options: EpisodeOptions, seed: int) -> User | None:
    """The simulated user; None when none is configured or the task gives it no context."""
    if options.user is None or not task.user_context:
        return None
    try:
        return options.user(task, None, seed)
    except UserFault:
        raise
    except (Exception, SystemExit) as error:  # the episode boundary: any error in making a user voids the episode
        raise UserFault(
            f"task {task.uid}: making the simulated user raised {words_of(error)}. The episode is void; fix the cause."
        ) from error


# --- what the episodes of a process share -------------------------------------------------------------------

_resources: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()
T = TypeVar("T")


def _pool(dataset: Dataset, options: EpisodeOptions) -> ServerPool:
    timeout_s = _TIMEOUT_S if options.tool_timeout_s is None else options.tool_timeout_s
    if dataset.servers_file is None:
        raise ConfigError(
            f"dataset '{dataset.name}' ({dataset.root}) has no servers/servers.yaml, so its tasks cannot be run. Give "
            f"register_dataset(..., servers=) the file."
        )
    servers_file, python, checkout = dataset.servers_file, dataset.servers_python, dataset.root.parent

    def make() -> ServerPool:
        servers = load_servers(servers_file, python=python, checkout=checkout)
        return ServerPool(servers, start=options.start, call_timeout_s=timeout_s)

    return _shared(("servers", str(servers_file), str(checkout), python, options.start, timeout_s), make)


def _shared(key: tuple[Any, ...], make: Callable[[], T]) -> T:
    key = (os.getpid(), *key)
    with _lock:
        if key not in _resources:
            _resources[key] = make()
        return _resources[key]


def close_shared() -> None:
    """Close the server pools and check workers of this process; the next episode makes new ones."""
    with _lock:
        mine = [key for key in _resources if key[0] == os.getpid()]
        ending = [_resources.pop(key) for key in mine]
    for resource in ending:
        resource.close()


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may have held the lock, and nothing would ever release it here."""
    global _lock
    _lock = threading.Lock()


atexit.register(close_shared)
os.register_at_fork(after_in_child=_renew_lock)
