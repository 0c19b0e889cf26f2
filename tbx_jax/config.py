"""Configuration records: Hydra composes, this file validates, and nobody below it sees a DictConfig.

Defaults live in `conf/` only; the records have none, so a missing key is an error and a default cannot be in two
places. Unknown keys are refused. Records are frozen and hash, so equal configurations share one compiled function.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tbx_envs.errors import ConfigError

Positive = Annotated[int, pydantic.Field(gt=0)]
Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(gt=0.0)]
Share = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False)


class RopeScaling(Record):
    """How Llama 3.1 and later slow their long rotary waves down (`rope_type: llama3`)."""

    factor: Annotated[float, pydantic.Field(gt=0.0)]
    low_freq_factor: Annotated[float, pydantic.Field(gt=0.0)]
    high_freq_factor: Annotated[float, pydantic.Field(gt=0.0)]
    original_length: Positive


class HybridConfig(Record):
    """Layers of the Qwen3.5 kind: gated delta nets, and after every few of them one layer of gated attention."""

    delta_layers: Positive
    rotary_width: Positive
    conv_taps: Annotated[int, pydantic.Field(ge=2)]
    key_heads: Positive
    value_heads: Positive
    key_width: Positive
    value_width: Positive

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


class ModelConfig(Record):
    """A decoder: dense (Llama, Qwen2, Qwen3 and our own), or a hybrid of the Qwen3.5 kind.

    Letters of the alphabet are in `tbx_jax.shapes`.
    """

    num_layers: Positive
    width: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_width: Positive
    mlp_width: Positive
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    hybrid: HybridConfig | None
    token_shift: Count
    max_length: Positive
    dtype: Literal["float32", "bfloat16"]

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers // (self.hybrid.delta_layers + 1) if self.hybrid else self.num_layers


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


class PricesConfig(Record):
    """Per million tokens, in one currency."""

    input: Annotated[float, pydantic.Field(ge=0.0)]
    cached: Annotated[float, pydantic.Field(ge=0.0)]
    output: Annotated[float, pydantic.Field(ge=0.0)]


class EndpointSettings(Record):
    """A server that speaks OpenAI's chat completions."""

    base_url: str
    model: str
    api_key_env: str | None
    temperature: Annotated[float, pydantic.Field(ge=0.0)] | None
    max_tokens: Positive | None
    timeout_s: Seconds
    concurrency: Positive
    max_retries: Count
    extra_body: dict[str, Any]
    prices: PricesConfig | None


def _endpoint_when_served(part: Any) -> Any:
    if (part.kind == "endpoint") != (part.endpoint is not None):
        raise ValueError("an endpoint belongs to kind=endpoint, and only to it")
    return part


class JudgeConfig(Record):
    kind: Literal["none", "yes", "endpoint"]
    style: Literal["plain", "motivation"]
    endpoint: EndpointSettings | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class UserConfig(Record):
    kind: Literal["default", "endpoint"]
    can_end: bool
    endpoint: EndpointSettings | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class AgentConfig(Record):
    kind: Literal["none", "endpoint"]
    chat_format: str
    endpoint: EndpointSettings | None

    _whole = pydantic.model_validator(mode="after")(_endpoint_when_served)


class EnvironmentConfig(Record):
    """How episodes run, apart from what is in them."""

    concurrency: Positive
    tool_timeout_s: Seconds | None
    check_timeout_s: Seconds
    start: Literal["fork", "spawn"]
    clock: datetime.datetime | None
    clock_runs: bool


class TrainConfig(Record):
    algo: AlgoConfig
    optim: OptimConfig
    sampling: SamplingConfig
    mesh: MeshConfig
    judge: JudgeConfig
    user: UserConfig
    environment: EnvironmentConfig
    seed: Count
    steps: Positive
    policy: str
    compute_dtype: Literal["float32", "bfloat16"] | None
    tasks: str
    pool: str | None
    train_on_benchmark_and_mark_results: bool
    checkpoint_every: Positive
    output_dir: str


class EvaluateConfig(Record):
    sampling: SamplingConfig
    mesh: MeshConfig
    judge: JudgeConfig
    user: UserConfig
    environment: EnvironmentConfig
    agent: AgentConfig
    seed: Count
    policy: str
    compute_dtype: Literal["float32", "bfloat16"] | None
    tasks: str
    attempts: Positive
    error_rate: Annotated[float, pydantic.Field(ge=0.0)]
    max_void_retries: Count
    regrade: str | None
    output_dir: str


class PoolConfig(Record):
    sampling: SamplingConfig
    mesh: MeshConfig
    judge: JudgeConfig
    user: UserConfig
    environment: EnvironmentConfig
    agent: AgentConfig
    seed: Count
    policy: str
    compute_dtype: Literal["float32", "bfloat16"] | None
    tasks: str
    attempts: Positive
    bands: tuple[Literal["too_hard", "hard", "medium", "easy", "too_easy"], ...]
    train_on_benchmark_and_mark_results: bool
    max_void_retries: Count
    output_dir: str


class SftConfig(Record):
    model: ModelConfig
    optim: OptimConfig
    mesh: MeshConfig
    seed: Count
    policy: str | None
    compute_dtype: Literal["float32", "bfloat16"] | None
    chat_template: Literal["tools", "compact"] | None
    domain: str
    families: tuple[str, ...] | None
    demonstrations: Positive
    error_rate: Annotated[float, pydantic.Field(ge=0.0)]
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
    judge: JudgeConfig
    user: UserConfig
    environment: EnvironmentConfig
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
