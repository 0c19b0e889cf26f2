"""Configuration records: Hydra composes, this file validates, and nobody below it sees a DictConfig.

Defaults live in `conf/` only; the records have none, so a missing key is an error and a default cannot be in two
places. Unknown keys are refused. Records are frozen and hash, so equal configurations share one compiled function.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tbx_envs.errors import ConfigError

Positive = Annotated[int, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False)


class ModelConfig(Record):
    """A dense decoder of the Qwen3 kind; letters of the alphabet in `tbx_jax.shapes`."""

    num_layers: Positive
    width: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_width: Positive
    mlp_width: Positive
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    qk_norm: bool
    token_shift: Count
    max_length: Positive
    dtype: Literal["float32", "bfloat16"]


class AlgoConfig(Record):
    group_size: Annotated[int, pydantic.Field(ge=2)]
    groups_per_update: Positive
    groups_rolled: Positive
    max_rounds: Positive
    normalize_by_std: bool
    clip_low: Share
    clip_high: Annotated[float, pydantic.Field(ge=0.0)]
    dual_clip: Annotated[float, pydantic.Field(gt=1.0)] | None
    max_void_retries: Count
    micro_batch: Positive


class OptimConfig(Record):
    learning_rate: Annotated[float, pydantic.Field(gt=0.0)]
    b1: Share
    b2: Share
    weight_decay: Annotated[float, pydantic.Field(ge=0.0)]
    clip_norm: Annotated[float, pydantic.Field(gt=0.0)]
    warmup_steps: Count
    schedule: Literal["constant", "cosine"]


class SamplingConfig(Record):
    temperature: Annotated[float, pydantic.Field(ge=0.0)]
    top_k: Positive | None
    top_p: Annotated[float, pydantic.Field(gt=0.0, le=1.0)]
    max_turn_tokens: Positive
    max_episode_tokens: Positive
    slots: Positive
    decode_steps: Positive


class MeshConfig(Record):
    axes: dict[str, Positive]
    rules: dict[str, str]


class TrainConfig(Record):
    algo: AlgoConfig
    optim: OptimConfig
    sampling: SamplingConfig
    mesh: MeshConfig
    seed: Count
    steps: Positive
    policy: str
    tasks: str
    pool: str | None
    checkpoint_every: Positive
    output_dir: str


class EvaluateConfig(Record):
    sampling: SamplingConfig
    mesh: MeshConfig
    seed: Count
    policy: str
    tasks: str
    attempts: Positive
    lapse: Annotated[float, pydantic.Field(ge=0.0)]
    max_void_retries: Count
    output_dir: str


class PoolConfig(Record):
    sampling: SamplingConfig
    mesh: MeshConfig
    seed: Count
    policy: str
    tasks: str
    attempts: Positive
    bands: tuple[Literal["too_hard", "hard", "medium", "easy", "too_easy"], ...]
    max_void_retries: Count
    output_dir: str


class WarmstartConfig(Record):
    model: ModelConfig
    optim: OptimConfig
    mesh: MeshConfig
    seed: Count
    domain: str
    demonstrations: Positive
    lapse: Annotated[float, pydantic.Field(ge=0.0)]
    epochs: Positive
    batch_tokens: Positive
    vocabulary: Positive
    output_dir: str


class DemoConfig(Record):
    algo: AlgoConfig
    optim: OptimConfig
    rollout: SamplingConfig
    evaluation: SamplingConfig
    mesh: MeshConfig
    seed: Count
    policy: str
    steps: Positive
    attempts: Positive
    pool_attempts: Positive
    bands: tuple[Literal["too_hard", "hard", "medium", "easy", "too_easy"], ...]
    checkpoint_every: Positive
    max_void_retries: Count
    output_dir: str


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
