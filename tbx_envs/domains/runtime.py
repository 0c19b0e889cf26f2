"""The runtime of our own domains: a copy of the task's world, tools in this process, the state check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tbx_envs.domains import Domain
from tbx_envs.domains.in_process import InProcessSession
from tbx_envs.domains.state_check import check_state
from tbx_envs.domains.worlds import WorldTemplate, lend_world, return_world, template_for
from tbx_envs.doors import words_of
from tbx_envs.episode import CheckReport, Episode
from tbx_envs.errors import CheckFault, UserFault
from tbx_envs.messages import Message, Text, ToolCall, ToolResult, Transcript, Turn
from tbx_envs.runtime import EpisodeOptions, user_usage
from tbx_envs.task import AnyTask, Task, content_hash
from tbx_envs.tools.listing import domain_function_dicts
from tbx_envs.tools.session import Answer
from tbx_envs.users import User
from tbx_envs.users.scripted import ScriptedUser

_TIMEOUT_S = 10.0


class DomainSource:
    """The tasks of one domain (`tbx_envs.runtime.TaskSource`)."""

    waits = False

    def __init__(self, domain: Domain) -> None:
        self.domain = domain

    def task(self, uid: str) -> Task:
        return self.domain.task(uid)

    def require(self, uid: str) -> None:
        self.domain.task(uid)

    def tools(self, task: AnyTask) -> list[dict[str, Any]]:
        return domain_function_dicts(self.domain.tools)

    def start(self, task: AnyTask, options: EpisodeOptions, seed: int) -> DomainRuntime:
        return DomainRuntime(_ours(task), self.domain, options, seed)

    def grade_again(
        self, task: AnyTask, episode: Episode, options: EpisodeOptions
    ) -> tuple[CheckReport, dict[str, int]]:
        """The report of the check after the episode's calls were made again in a fresh world. They must be answered as
        before, otherwise the tools have changed."""
        calls = {
            call.id: call
            for said in episode.transcript
            if isinstance(said, Turn)
            for call in said.calls
            if isinstance(call, ToolCall)
        }
        runtime = self.start(task, options, episode.seed)
        try:
            for said in episode.transcript:
                if not isinstance(said, ToolResult) or said.call_id not in calls:
                    continue
                call = calls[said.call_id]
                answer = runtime.call(call.name, call.arguments)
                if (answer.text, answer.status) != (said.text, said.status):
                    raise CheckFault(
                        f"task {task.uid}: {call.name} ({call.id}) is not answered as when the episode ran, so it "
                        f"cannot be graded again. Then: {said.text[:200]!r}. Now: {answer.text[:200]!r}."
                    )
            return runtime.check(episode.transcript, None), {}
        finally:
            runtime.close()

    def task_hash(self, task: AnyTask) -> str:
        """Hash of the task, the rules and the texts of the tools."""
        tools = [[tool.name, tool.description, tool.input_schema] for tool in self.domain.tools]
        texts = json.dumps([self.domain.rules, tools], sort_keys=True)
        return hashlib.sha256(f"{content_hash(_ours(task))} {texts}".encode()).hexdigest()

    def is_heldout_family(self, task: AnyTask) -> bool:
        return self.domain.families[task.family].num_train == 0


def _ours(task: AnyTask) -> Task:
    assert isinstance(task, Task), f"{task.uid} is not a task of a domain"
    return task


class DomainRuntime:
    """The runtime of a domain's task (`tbx_envs.runtime.Runtime`).

    Raises:
        EnvironmentFault: the world or the user could not be made.
        DomainError: the task's expected calls fail.
    """

    user: User | None
    user_may_end = True
    ends_turn: frozenset[str] = frozenset()

    def __init__(self, task: Task, domain: Domain, options: EpisodeOptions, seed: int) -> None:
        self.opening: tuple[Message, ...] = (Text("system", domain.rules), Text("user", task.query))
        self.user_turns = task.limits.user_turns
        self.template: WorldTemplate = template_for(task, domain)
        self.world = lend_world(self.template)
        self._lent = True
        self._domain = domain
        timeout_s = _TIMEOUT_S if options.tool_timeout_s is None else options.tool_timeout_s
        self._session = InProcessSession.open(domain, self.world, timeout_s)
        try:
            self.user = (options.user or ScriptedUser)(task, domain, seed)
        except UserFault:
            self.discard(UserFault.kind)
            raise
        except (Exception, SystemExit) as error:  # the episode boundary: any error in making a user voids the episode
            self.discard(UserFault.kind)
            raise UserFault(
                f"task {task.uid}: making the simulated user raised {words_of(error)}. The episode is void; fix the "
                f"cause."
            ) from error

    @property
    def tools(self) -> list[dict[str, Any]]:
        return domain_function_dicts(self._domain.tools)

    def call(self, name: Any, arguments: Any) -> Answer:
        return self._session.call(name, arguments)

    @property
    def usage(self) -> dict[str, int]:
        return user_usage(self.user)

    def evidence(self, transcript: Transcript) -> Mapping[str, Any] | None:
        return None

    def check(self, transcript: Transcript, evidence: Mapping[str, Any] | None) -> CheckReport:
        return check_state(self.world, self.template)

    def close(self) -> None:
        if self._lent:
            self._lent = False
            return_world(self.world)

    def discard(self, kind: str) -> None:
        if self._lent and kind != "tool":  # an abandoned tool may still be using the database
            self.world.close()
        self._lent = False
