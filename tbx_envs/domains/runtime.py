"""The stage of our own domains: a copy of the task's world, tools in this process, the state check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tbx_envs.domains import Domain
from tbx_envs.domains.in_process import InProcessSession
from tbx_envs.domains.state_check import check_state
from tbx_envs.domains.worlds import WorldTemplate, lend_world, return_world, template_for
from tbx_envs.episode import CheckReport
from tbx_envs.errors import UserFault
from tbx_envs.messages import Message, Text, Transcript
from tbx_envs.runtime import EpisodeOptions, user_usage
from tbx_envs.task import Task
from tbx_envs.tools.listing import domain_function_dicts
from tbx_envs.tools.session import Answer
from tbx_envs.users import User
from tbx_envs.users.scripted import ScriptedUser

_TIMEOUT_S = 10.0


class DomainRuntime:
    """See `tbx_envs.runtime.Runtime`.

    Raises:
        EnvironmentFault: the world could not be made, or the user could not.
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
        except Exception as error:  # the episode boundary: whatever making a user raises voids the episode
            self.discard(UserFault.kind)
            raise UserFault(
                f"task {task.uid}: making the simulated user raised {type(error).__name__}: {error}. The episode is "
                f"void; fix it."
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
        if self._lent and kind != "tool":  # an abandoned tool may still hold the database
            self.world.close()
        self._lent = False
