"""Configuration records of the trainer. Those of the environments' own commands are in `tbx_envs.commands.config`."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from tbx_envs.commands.config import (
    AgentConfig,
    Band,
    Count,
    EnvironmentConfig,
    ErrorRate,
    EvaluateConfig,
    JudgeConfig,
    MeshConfig,
    PlayConfig,
    PoolConfig,
    Positive,
    Precision,
    Record,
    SamplingConfig,
    Share,
    UserConfig,
    validated,
)


class RopeScaling(Record):
    """The scaling of rotary frequencies in Llama 3.1 and later (`rope_type: llama3`)."""

    factor: Annotated[float, pydantic.Field(gt=0.0)]
    low_freq_factor: Annotated[float, pydantic.Field(gt=0.0)]
    high_freq_factor: Annotated[float, pydantic.Field(gt=0.0)]
    original_length: Positive


class HybridConfig(Record):
    """Layers of the Qwen3.5 kind: one layer of gated attention after every `delta_layers` gated delta nets."""

    delta_layers: Positive
    rotary_width: Positive
    conv_taps: Annotated[int, pydantic.Field(ge=2)]
    key_heads: Positive
    value_heads: Positive
    key_width: Positive
    value_width: Positive

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


class ModelConfig(Record):
    """A decoder: dense (Llama, Qwen2, Qwen3 and our own), or a hybrid of the Qwen3.5 kind.

    The logical axes are in `tbx_jax.shapes`.
    """

    model_config = pydantic.ConfigDict(allow_inf_nan=False)  # beside what `Record` says

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
        """Number of layers that cache keys and values."""
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


class TrainConfig(PlayConfig):
    algo: AlgoConfig
    optim: OptimConfig
    sampling: SamplingConfig
    steps: Positive
    compute_dtype: Precision | None
    tasks: str
    pool: str | None
    train_on_benchmark_and_mark_results: bool
    checkpoint_every: Positive


class SftConfig(Record):
    model: ModelConfig
    optim: OptimConfig
    mesh: MeshConfig
    seed: Count
    policy: str | None
    compute_dtype: Precision | None
    chat_template: Literal["tools", "compact"] | None
    domain: str
    families: tuple[str, ...] | None
    demonstrations: Positive
    error_rate: ErrorRate
    epochs: Positive
    batch_tokens: Positive
    vocabulary: Positive
    output_dir: str


class DemoConfig(PlayConfig):
    algo: AlgoConfig
    optim: OptimConfig
    rollout: SamplingConfig
    evaluation: SamplingConfig
    steps: Positive
    attempts: Positive
    pool_attempts: Positive
    bands: tuple[Band, ...]
    checkpoint_every: Positive
    max_void_retries: Count


__all__ = [
    "AgentConfig",
    "AlgoConfig",
    "DemoConfig",
    "EnvironmentConfig",
    "EvaluateConfig",
    "HybridConfig",
    "JudgeConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "PlayConfig",
    "PoolConfig",
    "Record",
    "RopeScaling",
    "SamplingConfig",
    "SftConfig",
    "TrainConfig",
    "UserConfig",
    "validated",
]
