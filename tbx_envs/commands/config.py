"""Configuration records: Hydra composes, these validate, and nothing below the commands sees a DictConfig.

Defaults are in `conf/` only; the records have none, so a missing key is an error and no default is in two places.
Unknown keys are refused. Records are frozen and hashable, so that equal configurations share one compiled function.
Records that only the trainer needs are in `tbx_jax.config`.
"""

from __future__ import annotations

import dataclasses
import datetime
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tbx_envs.commands.overrides import near_key
from tbx_envs.doors import shown
from tbx_envs.endpoints.config import EndpointConfig
from tbx_envs.errors import ConfigError

Positive = Annotated[int, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(gt=0.0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]
ErrorRate = Annotated[float, pydantic.Field(ge=0.0)]
Precision = Literal["float32", "bfloat16"]
Band = Literal["too_hard", "hard", "medium", "easy", "too_easy"]


# Keys that were renamed: the old name still works, with a warning, until version 0.3.
RENAMED_KEYS = {"lapse": "error_rate"}


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
        """`episodes`, or the number of cache slots when that is null.

        With more episodes than cache slots, those that wait for their environment are swapped out.
        """
        return self.slots if self.episodes is None else self.episodes


class MeshConfig(Record):
    axes: dict[str, Positive]
    rules: dict[str, str]


def _every_key(given: Any) -> Any:
    """In Python the record of an endpoint has defaults; a configuration has its defaults in `conf/` only."""
    if isinstance(given, Mapping):
        missing = [field.name for field in dataclasses.fields(EndpointConfig) if field.name not in given]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing; conf/endpoint/chat.yaml has every key")
    return given


Endpoint = Annotated[EndpointConfig, pydantic.BeforeValidator(_every_key)]


def _endpoint_when_served(part: Any) -> Any:
    if (part.kind == "endpoint") != (part.endpoint is not None):
        raise ValueError("an endpoint belongs to kind=endpoint, and only to it")
    return part


class JudgeConfig(Record):
    kind: Literal["none", "yes", "endpoint"]
    style: Literal["plain", "motivation"]
    endpoint: Endpoint | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class UserConfig(Record):
    kind: Literal["default", "endpoint"]
    can_end: bool
    max_silent_share: Share
    endpoint: Endpoint | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class AgentConfig(Record):
    kind: Literal["none", "endpoint"]
    chat_format: str
    endpoint: Endpoint | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class EnvironmentConfig(Record):
    """How episodes run: concurrency, time limits, and the processes and clock of a dataset's servers."""

    concurrency: Positive
    tool_timeout_s: Seconds | None
    user_timeout_s: Seconds | None
    check_timeout_s: Seconds
    start: Literal["fork", "spawn"]
    clock: datetime.datetime | None
    clock_runs: bool


class PlayConfig(Record):
    """The keys of every program that runs episodes."""

    mesh: MeshConfig
    judge: JudgeConfig
    user: UserConfig
    environment: EnvironmentConfig
    seed: Count
    policy: str
    output_dir: str


class AttemptsConfig(PlayConfig):
    """The keys of an evaluation run and of the selection of a pool: tasks, each attempted several times."""

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


def warn_of_key(old: str) -> None:
    """The warning about a key by its old name."""
    said = f"the key '{old}' is now called '{RENAMED_KEYS[old]}'; the old name works until tbx 0.3."
    warnings.warn(said, DeprecationWarning, stacklevel=3)


R = TypeVar("R", bound=Record)


def validated(record: type[R], composed: DictConfig | dict[str, Any]) -> R:
    """The composed configuration as a frozen record: the one boundary between Hydra and the program.

    Raises:
        ConfigError: the configuration has problems; the message lists all of them, each with the path of its key.
    """
    if isinstance(composed, DictConfig) and (missing := sorted(OmegaConf.missing_keys(composed))):
        needed = " ".join(f"{key}=..." for key in missing)
        raise ConfigError(f"{', '.join(missing)} missing. Add {needed}")
    try:
        plain = (
            OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            if isinstance(composed, DictConfig)
            else composed
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration cannot be resolved: {error}") from error
    for old, new in RENAMED_KEYS.items():
        if isinstance(plain, dict) and old in plain and new in record.model_fields:
            warn_of_key(old)
            plain[new] = plain.pop(old)
    try:
        return record.model_validate(plain)
    except pydantic.ValidationError as error:
        keys = tuple(_keys(record))
        problems = [_problem(item, keys) for item in error.errors()]
        raise ConfigError(
            f"{record.__name__}: {len(problems)} problem(s) in the configuration:\n" + "\n".join(problems)
        ) from error


def _problem(item: Any, keys: Sequence[str]) -> str:
    """A line about one error of pydantic."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"  {key}: there is no such key.{near_key(key, keys)}"
    if item["type"] == "missing":  # what was given is all that is around it
        return f"  {key}: is missing. conf/ has its default; give {key}=..."
    return f"  {key}: {item['msg']} (given: {shown(item['input'])})"


def _keys(record: type[pydantic.BaseModel], before: str = "") -> Iterator[str]:
    """The keys of a record and of the records in it, each with the path that leads to it."""
    for name, field in record.model_fields.items():
        yield before + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _keys(field.annotation, f"{before}{name}.")
