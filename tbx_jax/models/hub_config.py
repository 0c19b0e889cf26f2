"""`config.json` of published models, read into a `ModelConfig` and written from one.

Reading is strict: a key that changes what a model computes and is not implemented is an error, and so is an unknown
key. One message lists all problems of a file.

Source of keys and of their defaults: the configuration classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tbx_envs.errors import CheckpointError, did_you_mean
from tbx_jax.config import ModelConfig, validated

DENSE_TYPES = ("llama", "qwen2", "qwen3")
HYBRID_TYPE = "qwen3_5_text"
# The same language model with an image encoder, which is not read. Its tensors and keys are copied when saving.
COMPOSITE_TYPE = "qwen3_5"
TYPES = (*DENSE_TYPES, HYBRID_TYPE, COMPOSITE_TYPE)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    HYBRID_TYPE: "Qwen3_5ForCausalLM",
}
_MIXTURES = ("moe", "mixtral", "next", "exp")  # parts of names of model types with experts

# Keys without effect on what a language model computes.
_INERT = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "max_window_layers",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "pad_token_id",
        "pretraining_tp",
        "sliding_window",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
# Read elsewhere, or about the positions of images.
_ROPE_KNOWN = frozenset(
    {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_interleaved", "mrope_section"}
)
_LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
_REQUIRED = object()


def read_config(fields: Mapping[str, Any], dtype: str | None = None) -> tuple[ModelConfig, int]:
    """Configuration and vocabulary of a published model.

    Args:
        fields: content of its `config.json`.
        dtype: type of the computation; None is the type in the file.

    Raises:
        CheckpointError: a type or options that are not implemented, keys that are missing or unknown; one message
            lists all problems.
        ConfigError: invalid values.
    """
    model_type = fields.get("model_type")
    if model_type not in TYPES:
        mixture = any(part in str(model_type) for part in _MIXTURES)
        reason = "a mixture of experts or another kind that is not implemented" if mixture else "not implemented"
        raise CheckpointError(
            f"model_type {model_type!r} is {reason}.{did_you_mean(str(model_type), TYPES)} Known: {', '.join(TYPES)}."
        )
    if model_type == COMPOSITE_TYPE:
        text = dict(fields.get("text_config") or {})
        fields = {"tie_word_embeddings": fields.get("tie_word_embeddings", False), "dtype": fields.get("dtype"), **text}
    keys = _Keys(fields)
    config = _hybrid(keys) if model_type in (HYBRID_TYPE, COMPOSITE_TYPE) else _dense(keys, model_type)
    vocabulary = keys.take("vocab_size")
    keys.must("hidden_act", "silu")
    keys.must("attention_dropout", 0, absent=0)
    keys.must("quantization_config", None, absent=None)
    config |= {
        "num_layers": keys.take("num_hidden_layers"),
        "width": keys.take("hidden_size"),
        "mlp_width": keys.take("intermediate_size"),
        "norm_eps": keys.take("rms_norm_eps"),
        "tie_embeddings": keys.take("tie_word_embeddings", False),
        "max_length": keys.take("max_position_embeddings"),
        "token_shift": 0,
        "dtype": dtype or fields.get("dtype") or fields.get("torch_dtype") or "float32",
    }
    keys.finish(model_type)
    return validated(ModelConfig, config), vocabulary


def _dense(keys: _Keys, model_type: str) -> dict[str, Any]:
    """The keys of dense models."""
    num_heads, width = keys.take("num_attention_heads"), keys.peek("hidden_size")
    own_width = width // num_heads if isinstance(width, int) and isinstance(num_heads, int) and num_heads else None
    keys.must("attention_bias", False, absent=False)
    keys.must("mlp_bias", False, absent=False)
    keys.must("rope_interleaved", False, absent=False)
    keys.must("use_sliding_window", False, absent=False)
    layers = keys.take("layer_types", None)
    if layers is not None and set(layers) != {"full_attention"}:
        keys.problems.append(f"layer_types has {', '.join(sorted(set(layers)))}; implemented is full_attention only")
    if (keys.peek("rope_parameters") or {}).get("partial_rotary_factor", 1.0) != 1.0:
        keys.problems.append("partial_rotary_factor is implemented for hybrids only")
    theta, scaling = _rope(keys, kinds=("default", "llama3"))
    return {
        "num_heads": num_heads,
        "num_kv_heads": keys.take("num_key_value_heads", num_heads),
        "head_width": keys.take("head_dim", own_width if model_type != "qwen3" else _REQUIRED),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": model_type == "qwen3",
        "qkv_bias": model_type == "qwen2",
        "hybrid": None,
    }


def _hybrid(keys: _Keys) -> dict[str, Any]:
    """The keys of hybrids of the Qwen3.5 type."""
    keys.must("attention_bias", False, absent=False)
    keys.must("attn_output_gate", True, absent=True)
    keys.must("mamba_ssm_dtype", "float32", absent="float32")
    head_width = keys.take("head_dim")
    rope = keys.peek("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", keys.take("partial_rotary_factor", 0.25))
    theta, scaling = _rope(keys, kinds=("default",))
    return {
        "num_heads": keys.take("num_attention_heads"),
        "num_kv_heads": keys.take("num_key_value_heads"),
        "head_width": head_width,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": True,
        "qkv_bias": False,
        "hybrid": {
            "delta_layers": _delta_layers(keys),
            "rotary_width": int((head_width or 0) * share),
            "conv_taps": keys.take("linear_conv_kernel_dim"),
            "key_heads": keys.take("linear_num_key_heads"),
            "value_heads": keys.take("linear_num_value_heads"),
            "key_width": keys.take("linear_key_head_dim"),
            "value_width": keys.take("linear_value_head_dim"),
        },
    }


def _delta_layers(keys: _Keys) -> int:
    """The number of delta layers before each attention layer, the same for all."""
    interval = keys.take("full_attention_interval", None)
    layers = keys.take("layer_types", None)
    num_layers = keys.peek("num_hidden_layers")
    if layers is None:
        return (interval or 4) - 1
    period = (layers.index("full_attention") if "full_attention" in layers else len(layers)) + 1
    regular = ["linear_attention"] * (period - 1) + ["full_attention"]
    if layers != regular * (len(layers) // period) or len(layers) != num_layers or interval not in (None, period):
        keys.problems.append(
            f"layer_types must repeat some linear_attention and one full_attention over num_hidden_layers "
            f"{num_layers}; it is {layers} with full_attention_interval {interval}"
        )
    return max(period - 1, 1)


def _rope(keys: _Keys, kinds: tuple[str, ...]) -> tuple[Any, dict[str, Any] | None]:
    """Base and scaling of the rotary positions, from the keys of transformers 4 or 5."""
    old, new, theta = keys.take("rope_scaling", None), keys.take("rope_parameters", None), keys.take("rope_theta", None)
    rope = dict(new or old or {})
    theta = rope.get("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if theta is None:
        keys.problems.append("rope_theta is missing")
    if kind not in kinds:
        keys.problems.append(f"rotary positions of type {kind!r} are not implemented, only {' and '.join(kinds)}")
        return theta, None
    known = _ROPE_KNOWN | (set(_LLAMA3_KEYS.values()) if kind == "llama3" else set())
    unknown = sorted(set(rope) - known)
    if unknown:
        keys.problems.append(f"unknown keys of rope_parameters: {', '.join(unknown)}")
    if kind == "default":
        return theta, None
    rope.setdefault("original_max_position_embeddings", keys.peek("max_position_embeddings"))
    missing = [key for key in _LLAMA3_KEYS.values() if rope.get(key) is None]
    if missing:
        keys.problems.append(f"rope_parameters of type llama3 lack {', '.join(missing)}")
        return theta, None
    return theta, {name: rope[key] for name, key in _LLAMA3_KEYS.items()}


class _Keys:
    """Reads the keys of a file, and collects problems."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._taken: set[str] = set()
        self.problems: list[str] = []

    def peek(self, key: str) -> Any:
        return self._fields.get(key)

    def take(self, key: str, absent: Any = _REQUIRED) -> Any:
        """The value of a key; `absent` when it is missing or null."""
        self._taken.add(key)
        value = self._fields.get(key)
        if value is None:
            if absent is _REQUIRED:
                self.problems.append(f"{key} is missing")
                return None
            return absent
        return value

    def must(self, key: str, value: Any, *, absent: Any = _REQUIRED) -> None:
        """Adds a problem when the key has any other value, since only `value` is implemented."""
        if (found := self.take(key, absent)) != value and not (found is None and absent is _REQUIRED):
            self.problems.append(f"{key} is {found!r}, implemented is {value!r} only")

    def finish(self, model_type: str) -> None:
        """Raises CheckpointError for all problems, unknown keys among them."""
        unknown = sorted(set(self._fields) - self._taken - _INERT - {"model_type"})
        if unknown:
            self.problems.append(
                f"unknown keys: {', '.join(unknown)} (a key without effect on what the model computes may be removed "
                f"from the file)"
            )
        if self.problems:
            raise CheckpointError(
                f"model_type {model_type!r} with options that do not load: {'; '.join(self.problems)}."
            )


def hub_type(config: ModelConfig) -> str | None:
    """The published type of this model, None when only tbx can run it."""
    if config.token_shift:
        return None
    if config.hybrid:
        return HYBRID_TYPE if config.qk_norm and not config.qkv_bias and config.rope_scaling is None else None
    return {(False, False): "llama", (False, True): "qwen2", (True, False): "qwen3"}.get(
        (config.qk_norm, config.qkv_bias)
    )


def write_config(config: ModelConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    """`config.json` of a model that has a published type, with keys for transformers 4 and 5 and inference servers."""
    model_type = hub_type(config)
    assert model_type is not None  # the caller writes other models in our own format
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if (scaling := config.rope_scaling) is not None:
        rope |= {key: getattr(scaling, name) for name, key in _LLAMA3_KEYS.items()} | {"rope_type": "llama3"}
        fields["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if (hybrid := config.hybrid) is not None:
        rope["partial_rotary_factor"] = hybrid.rotary_width / config.head_width
        fields |= {
            "layer_types": (["linear_attention"] * hybrid.delta_layers + ["full_attention"]) * config.attention_layers,
            "linear_conv_kernel_dim": hybrid.conv_taps,
            "linear_num_key_heads": hybrid.key_heads,
            "linear_num_value_heads": hybrid.value_heads,
            "linear_key_head_dim": hybrid.key_width,
            "linear_value_head_dim": hybrid.value_width,
        }
    if model_type == "llama":
        fields["mlp_bias"] = False
    if model_type in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = False
    if model_type == "qwen2":
        del fields["attention_bias"]
    return fields | {"rope_theta": config.rope_theta, "rope_parameters": rope}
