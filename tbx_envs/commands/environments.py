"""Configuration becomes what episodes are given: the options of their environments, and the served models behind
users, judges and agents."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tbx_envs.commands.config import AgentConfig, EnvironmentConfig, JudgeConfig, PlayConfig, UserConfig
from tbx_envs.runtime import EpisodeOptions, UserMaker
from tbx_envs.sources import source_of

if TYPE_CHECKING:  # the HTTP client is imported when a run has an endpoint, not before
    from tbx_envs.endpoints.client import ChatEndpoint
    from tbx_envs.users.model import ModelUser


# The settings of an endpoint that decide what comes out of it.
OUTCOME_SETTINGS = ("base_url", "model", "temperature", "max_tokens", "extra_body")


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """The served models of a run; None where there is none.

    Attributes:
        agent: that `policy=endpoint` evaluates.
        user: that plays the users.
        judge: that answers the checks' questions.
    """

    agent: ChatEndpoint | None
    user: ChatEndpoint | None
    judge: ChatEndpoint | None

    @property
    def named(self) -> dict[str, ChatEndpoint]:
        """Those that there are, by what they are for."""
        made = {"agent": self.agent, "user": self.user, "judge": self.judge}
        return {name: endpoint for name, endpoint in made.items() if endpoint is not None}


@contextlib.contextmanager
def opened_endpoints(*, judge: JudgeConfig, user: UserConfig, agent: AgentConfig | None = None) -> Iterator[Endpoints]:
    """The endpoints that the configuration names, closed at the end; an interrupt takes back what they were asked."""
    with contextlib.ExitStack() as stack:

        def opened(part: Any) -> ChatEndpoint | None:
            if part is None or part.endpoint is None:
                return None
            from tbx_envs.endpoints.client import ChatEndpoint

            return stack.enter_context(contextlib.closing(ChatEndpoint(part.endpoint)))

        endpoints = Endpoints(agent=opened(agent), user=opened(user), judge=opened(judge))
        if endpoints.named:
            from tbx_envs.endpoints.client import stopped_by_interrupts

            stack.enter_context(stopped_by_interrupts(endpoints.named.values()))
        yield endpoints


def episode_options(config: PlayConfig, endpoints: Endpoints) -> EpisodeOptions:
    """The options of every episode of a run."""
    environment, judge = config.environment, config.judge
    options = EpisodeOptions(
        tool_timeout_s=environment.tool_timeout_s,
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
        options = dataclasses.replace(options, user=_user_maker(endpoints.user, config.user.can_end))
    return options


def _user_maker(endpoint: ChatEndpoint, can_end: bool) -> UserMaker:
    from tbx_envs.users.model import ModelUser, user_context_of

    def make(task: Any, domain: Any, seed: int) -> ModelUser:
        context = task.user_context if domain is None else user_context_of(task)
        return ModelUser(endpoint, context, can_end=can_end, seed=seed)

    return make


def concurrency_for(environment: EnvironmentConfig, uids: Sequence[str], endpoints: Endpoints) -> int:
    """How many episodes to play at the same time: those that only use this process gain nothing from threads."""
    waits = endpoints.agent is not None or endpoints.user is not None or any(source_of(uid).waits for uid in uids)
    return environment.concurrency if waits else 1


def environment_fingerprint(environment: EnvironmentConfig, judge: JudgeConfig, user: UserConfig) -> dict[str, Any]:
    """What of all this decides outcomes, for the fingerprint of an evaluation run; nothing where all is as by default.

    Keys, prices, time limits and numbers of connections are no part of it.
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
