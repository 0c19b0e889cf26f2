"""From configuration to episodes: the options of their environments, and the served models that act as agent, user or
judge."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbx_envs.commands.config import AgentConfig, EnvironmentConfig, JudgeConfig, PlayConfig, UserConfig
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.files import SpendingLog
from tbx_envs.runtime import EpisodeOptions, UserMaker
from tbx_envs.sources import source_of
from tbx_envs.task import AnyTask, Task
from tbx_envs.thinkingbox.dataset.records import DatasetTask

if TYPE_CHECKING:  # the HTTP client is imported only when an endpoint is configured
    from tbx_envs.domains import Domain
    from tbx_envs.endpoints.client import ChatEndpoint
    from tbx_envs.users.model import ModelUser


# The settings of an endpoint that can change its answers.
OUTCOME_SETTINGS = ("base_url", "model", "temperature", "max_tokens", "extra_body")


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """The served models of a program; None where none is configured.

    Attributes:
        agent: model that `policy=endpoint` evaluates.
        user: model that acts as the simulated users.
        judge: model that answers the checks' questions.
    """

    agent: ChatEndpoint | None
    user: ChatEndpoint | None
    judge: ChatEndpoint | None

    @property
    def named(self) -> dict[str, ChatEndpoint]:
        """The configured ones, by role."""
        made = {"agent": self.agent, "user": self.user, "judge": self.judge}
        return {name: endpoint for name, endpoint in made.items() if endpoint is not None}


@contextlib.contextmanager
def opened_endpoints(
    *, judge: JudgeConfig, user: UserConfig, agent: AgentConfig | None = None, run_folder: Path | str | None = None
) -> Iterator[Endpoints]:
    """The configured endpoints, closed at the end; an interrupt cancels their pending requests.

    Args:
        judge, user, agent: configuration of each role.
        run_folder: folder of the evaluation run that pays for their tokens; None keeps no account.
    """
    with contextlib.ExitStack() as stack:

        def opened(part: AgentConfig | UserConfig | JudgeConfig | None, role: str) -> ChatEndpoint | None:
            if part is None or part.endpoint is None:
                return None
            from tbx_envs.endpoints.client import ChatEndpoint

            spent = None if run_folder is None else SpendingLog(run_folder, role)
            return stack.enter_context(contextlib.closing(ChatEndpoint(part.endpoint, spent=spent)))

        endpoints = Endpoints(agent=opened(agent, "policy"), user=opened(user, "user"), judge=opened(judge, "judge"))
        if endpoints.named:
            from tbx_envs.endpoints.client import stopped_by_interrupts

            stack.enter_context(stopped_by_interrupts(endpoints.named.values()))
        yield endpoints


def episode_options(config: PlayConfig, endpoints: Endpoints) -> EpisodeOptions:
    """The options of every episode, from the configuration."""
    environment, judge = config.environment, config.judge
    options = EpisodeOptions(
        tool_timeout_s=environment.tool_timeout_s,
        user_timeout_s=environment.user_timeout_s,
        check_timeout_s=environment.check_timeout_s,
        start=environment.start,
        clock=environment.clock,
        clock_runs=environment.clock_runs,
        judge=judge.kind,
    )
    if endpoints.judge is not None:
        from tbx_envs.thinkingbox.grading.judge import EndpointJudge

        options = dataclasses.replace(options, judge=EndpointJudge(endpoints.judge, judge.style))
    if endpoints.user is not None:
        options = dataclasses.replace(
            options, user=_user_maker(endpoints.user, config.user.can_end, config.user.max_silent_share)
        )
    return options


def _user_maker(endpoint: ChatEndpoint, can_end: bool, max_silent_share: float) -> UserMaker:
    from tbx_envs.users.model import ModelUser, user_context_of

    def make(task: AnyTask, domain: Domain | None, seed: int) -> ModelUser:
        match task:
            case Task():
                context = user_context_of(task)
            case DatasetTask(user_context=str(context)):
                pass
            case _:
                raise ConfigError(
                    f"task {task.uid}: it gives its user no context, so a served model cannot be its user."
                )
        return ModelUser(endpoint, context, can_end=can_end, seed=seed, max_silent_share=max_silent_share)

    return make


def concurrency_for(environment: EnvironmentConfig, uids: Sequence[str], endpoints: Endpoints) -> int:
    """Number of episodes to run at the same time; 1 where nothing waits, since threads would gain nothing there."""
    waits = endpoints.agent is not None or endpoints.user is not None or any(source_of(uid).waits for uid in uids)
    return environment.concurrency if waits else 1


def environment_fingerprint(environment: EnvironmentConfig, judge: JudgeConfig, user: UserConfig) -> dict[str, Any]:
    """The settings that can change outcomes, for the fingerprint of an evaluation run; empty for the defaults.

    Keys, prices, time limits, numbers of connections and what is void are not part of it.
    """
    outcome = set(OUTCOME_SETTINGS)
    made: dict[str, Any] = {}
    if judge.kind != "none":
        made["judge"] = judge.model_dump(include={"kind": True, "style": True, "endpoint": outcome})
    if user.kind != "default":
        made["user"] = user.model_dump(include={"kind": True, "can_end": True, "endpoint": outcome})
    if environment.clock is not None:
        made["clock"] = [environment.clock.isoformat(), environment.clock_runs]
    return made
