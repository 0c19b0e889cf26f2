"""Configuration records: Hydra composes, these validate, and nothing below the commands sees a DictConfig.

Defaults live in `conf/` only; the records have none, so a missing key is an error and a default cannot be in two
places. Unknown keys are refused. Records are frozen and hash, so equal configurations share one compiled function.
What only the trainer needs is in `tbx_jax.config`.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tbx_envs.endpoints.config import EndpointConfig
from tbx_envs.errors import ConfigError

Positive = Annotated[int, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(gt=0.0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]
ErrorRate = Annotated[float, pydantic.Field(ge=0.0)]
Precision = Literal["float32", "bfloat16"]
Band = Literal["too_hard", "hard", "medium", "easy", "too_easy"]


class Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False)


class SamplingConfig(Record):
    temperature: Annotated[float, pydantic.Field(ge=0.0)]
    top_k: Positive | None
    top_p: Annotated[float, pydantic.Field(gt=0.0, le=1.0)]
    max_turn_tokens: Positive
    max_episode_tokens: Positive
    slots: Positive
    episodes: Positive | None
    decode_steps: Positive
    cache_dtype: Literal["float32", "bfloat16"] | None

    @property
    def episodes_in_flight(self) -> int:
        """As many as there are slots, unless it says more: those that wait for their environment are then parked."""
        return self.slots if self.episodes is None else self.episodes


class MeshConfig(Record):
    axes: dict[str, Positive]
    rules: dict[str, str]


def _endpoint_when_served(part: Any) -> Any:
    if (part.kind == "endpoint") != (part.endpoint is not None):
        raise ValueError("an endpoint belongs to kind=endpoint, and only to it")
    return part


class JudgeConfig(Record):
    kind: Literal["none", "yes", "endpoint"]
    style: Literal["plain", "motivation"]
    endpoint: EndpointConfig | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class UserConfig(Record):
    kind: Literal["default", "endpoint"]
    can_end: bool
    endpoint: EndpointConfig | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class AgentConfig(Record):
    kind: Literal["none", "endpoint"]
    chat_format: str
    endpoint: EndpointConfig | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class EnvironmentConfig(Record):
    """How episodes run, apart from what is in them."""

    concurrency: Positive
    tool_timeout_s: Seconds | None
    check_timeout_s: Seconds
    start: Literal["fork", "spawn"]
    clock: datetime.datetime | None
    clock_runs: bool


class PlayConfig(Record):
    """What every program that plays episodes is told."""

    mesh: MeshConfig
    judge: JudgeConfig
    user: UserConfig
    environment: EnvironmentConfig
    seed: Count
    policy: str
    output_dir: str


class AttemptsConfig(PlayConfig):
    """What an evaluation and the selection of a pool have in common: tasks, each attempted several times."""

    sampling: SamplingConfig
    agent: AgentConfig
    compute_dtype: Precision | None
    tasks: str
    attempts: Positive
    max_void_retries: Count


class EvaluateConfig(AttemptsConfig):
    error_rate: ErrorRate
    regrade: str | None


class PoolConfig(AttemptsConfig):
    bands: tuple[Band, ...]
    train_on_benchmark_and_mark_results: bool


R = TypeVar("R", bound=Record)


def validated(record: type[R], composed: DictConfig | dict[str, Any]) -> R:
    """The composed configuration as a frozen record: the one boundary between Hydra and the program.

    Raises:
        ConfigError: every problem of the configuration in one message, each with the path of its key.
    """
    try:
        plain = (
            OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            if isinstance(composed, DictConfig)
            else composed
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration cannot be resolved: {error}") from error
    try:
        return record.model_validate(plain)
    except pydantic.ValidationError as error:
        problems = [
            f"  {'.'.join(str(part) for part in item['loc'])}: {item['msg']} (given: {item['input']!r})"
            for item in error.errors()
        ]
        raise ConfigError(
            f"{record.__name__}: {len(problems)} problem(s) in the configuration:\n" + "\n".join(problems)
        ) from error
