"""`config.json` of published models, read into a `ModelConfig` and written from one.

Reading is strict: a key that changes what a model computes and is not implemented is an error, and so is an unknown
key. Of two keys that say the same thing none is dropped: they agree, or that is an error too. One message lists all
problems of a file.

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
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sliding_window",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
# Keys that published files have at one value, which is what is implemented; a missing or null key means the same.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "mlp_only_layers": ([],),
    "quantization_config": (),
}
_ONLY_DENSE = {
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
_ONLY_HYBRID = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("swish", "silu"),  # two names of one function: the gate behind the delta rule
}
# Keys of a composite beside its language model; they are about images.
_OF_IMAGES = frozenset(
    [
        "image_token_id",
        "language_model_only",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    ]
)
# Base of the rotary positions of files that give none in the place that counts, as in transformers.
_DEFAULT_THETA = 10000.0
# Read elsewhere, or about the positions of images.
_ROPE_KNOWN = frozenset(
    {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_interleaved", "mrope_section"}
)
_WITHOUT_EFFECT_ON_TEXT = frozenset({"mrope_interleaved", "mrope_section"})
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
    keys = _of_language_model(fields) if model_type == COMPOSITE_TYPE else _Keys(fields)
    is_hybrid = model_type in (HYBRID_TYPE, COMPOSITE_TYPE)
    config = _hybrid(keys) if is_hybrid else _dense(keys, model_type)
    vocabulary = keys.take("vocab_size")
    keys.must("hidden_act", "silu")
    for key, implemented in (_ONLY | (_ONLY_HYBRID if is_hybrid else _ONLY_DENSE)).items():
        keys.must(key, *implemented, may_be_absent=True)
    config |= {
        "num_layers": keys.take("num_hidden_layers"),
        "width": keys.take("hidden_size"),
        "mlp_width": keys.take("intermediate_size"),
        "norm_eps": keys.take("rms_norm_eps"),
        "tie_embeddings": keys.take("tie_word_embeddings", False),
        "max_length": keys.take("max_position_embeddings"),
        "token_shift": 0,
        "dtype": dtype or keys.agreed("the type of the computation", "dtype", "torch_dtype") or "float32",
    }
    keys.finish(model_type)
    return validated(ModelConfig, config), vocabulary


def _of_language_model(fields: Mapping[str, Any]) -> _Keys:
    """The keys of the language model in a composite; what the composite says itself must not differ from them."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"model_type {COMPOSITE_TYPE!r} needs text_config, an object; it is {text!r}.")
    outer = {key: value for key, value in fields.items() if key not in ("text_config", "model_type")}
    outer = {key: value for key, value in outer.items() if key not in _OF_IMAGES and value is not None}
    # The composite's own value is the one that transformers reads.
    tied = bool(outer.pop("tie_word_embeddings", False))
    keys = _Keys({"tie_word_embeddings": tied, **text})
    if keys.peek("tie_word_embeddings") not in (None, tied):
        keys.problems.append(f"tie_word_embeddings is {tied} for the composite and {not tied} in text_config")
    if text.get("model_type") not in (None, HYBRID_TYPE, COMPOSITE_TYPE):
        keys.problems.append(
            f"text_config is of model_type {text['model_type']!r}, implemented is {HYBRID_TYPE!r} only"
        )
    for key, value in outer.items():
        if key in ("dtype", "torch_dtype"):
            keys.also(key, value)
        elif key not in _INERT and text.get(key) != value:
            there = f"{text[key]!r} in it" if key in text else "not read there"
            keys.problems.append(f"{key} is {value!r} beside text_config and {there}")
    return keys


def _dense(keys: _Keys, model_type: str) -> dict[str, Any]:
    """The keys of dense models."""
    num_heads, width = keys.take("num_attention_heads"), keys.peek("hidden_size")
    own_width = width // num_heads if isinstance(width, int) and isinstance(num_heads, int) and num_heads else None
    layers = keys.take("layer_types", None)
    if layers is not None and (not isinstance(layers, list) or set(map(str, layers)) != {"full_attention"}):
        named = ", ".join(sorted(set(map(str, layers)))) if isinstance(layers, list) else repr(layers)
        keys.problems.append(f"layer_types has {named}; implemented is full_attention only")
    elif layers is not None and len(layers) != keys.peek("num_hidden_layers"):
        keys.problems.append(
            f"layer_types has {len(layers)} layers, num_hidden_layers is {keys.peek('num_hidden_layers')}"
        )
    theta, scaling, share = _rope(keys, kinds=("default", "llama3"))
    if share not in (None, 1.0):
        keys.problems.append("partial_rotary_factor is implemented for hybrids only")
    # transformers has a default of its own for this key in Qwen's types: 32, whatever the number of heads.
    kv_heads_default = num_heads if model_type == "llama" or keys.has("num_key_value_heads") else _REQUIRED
    return {
        "num_heads": num_heads,
        "num_kv_heads": keys.take("num_key_value_heads", kv_heads_default),
        "head_width": keys.take("head_dim", own_width if model_type != "qwen3" else _REQUIRED),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": model_type == "qwen3",
        "qkv_bias": model_type == "qwen2",
        "hybrid": None,
    }


def _hybrid(keys: _Keys) -> dict[str, Any]:
    """The keys of hybrids of the Qwen3.5 type."""
    head_width = keys.take("head_dim")
    theta, scaling, share = _rope(keys, kinds=("default",))
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
            "rotary_width": int((head_width or 0) * (0.25 if share is None else share)),
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


def _rope(keys: _Keys, kinds: tuple[str, ...]) -> tuple[Any, dict[str, Any] | None, Any]:
    """Base and scaling of the rotary positions, and the share of a head that turns; keys of transformers 4 or 5."""
    rope = _agreed_rope(keys)
    theta, kind, share = rope["rope_theta"], rope["rope_type"], rope.get("partial_rotary_factor")
    if kind not in kinds:
        keys.problems.append(f"rotary positions of type {kind!r} are not implemented, only {' and '.join(kinds)}")
        return theta, None, share
    known = _ROPE_KNOWN | (set(_LLAMA3_KEYS.values()) if kind == "llama3" else set())
    unknown = sorted(set(rope) - known)
    if unknown:
        keys.problems.append(f"unknown keys of rope_parameters: {', '.join(unknown)}")
    if kind == "default":
        return theta, None, share
    missing = [key for key in _LLAMA3_KEYS.values() if rope.get(key) is None]
    if missing:
        keys.problems.append(f"rope_parameters of type llama3 lack {', '.join(missing)}")
        return theta, None, share
    return theta, {name: rope[key] for name, key in _LLAMA3_KEYS.items()}, share


def _agreed_rope(keys: _Keys) -> dict[str, Any]:
    """What `rope_scaling`, `rope_parameters` and the keys beside them say together.

    transformers 5 takes `rope_scaling` where there is one and drops `rope_parameters`; older programs know only the
    first. So both must come to the same, each completed from the keys beside them.
    """
    places = {key: keys.take_object(key) for key in ("rope_scaling", "rope_parameters")}
    beside = {key: keys.take(key, None) for key in ("rope_theta", "partial_rotary_factor")}
    beside = {key: value for key, value in beside.items() if value is not None}
    if "rope_theta" not in beside and not any("rope_theta" in place for place in places.values()):
        keys.problems.append("rope_theta is missing")
    given = {name: place for name, place in places.items() if place} or {"rope_parameters": {}}
    setups = {name: _completed_rope(keys, name, place, beside) for name, place in given.items()}
    first = next(iter(setups.values()))  # rope_scaling before rope_parameters
    for setup in setups.values():
        for key in sorted(first.keys() | setup.keys()):
            if first.get(key) != setup.get(key) and key not in _WITHOUT_EFFECT_ON_TEXT:
                keys.problems.append(
                    f"{key} is {first.get(key)!r} by rope_scaling and {setup.get(key)!r} by rope_parameters; remove one"
                )
    return first


def _completed_rope(keys: _Keys, name: str, place: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """One object of rotary positions with the keys that it leaves to others, and with one name for its type."""
    rope = {key: value for key, value in place.items() if value is not None}
    for key, value in beside.items():
        if rope.get(key, value) != value:
            keys.problems.append(f"{key} is {rope[key]!r} in {name} and {value!r} beside it; remove one")
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope] or ["default"]
    if kinds[0] != kinds[-1]:
        keys.problems.append(f"{name} is of type {kinds[0]!r} by rope_type and {kinds[-1]!r} by type; remove one")
    rope = {"rope_theta": _DEFAULT_THETA, **beside, **rope, "rope_type": kinds[0]}
    if kinds[0] == "llama3":
        rope.setdefault("original_max_position_embeddings", keys.peek("max_position_embeddings"))
    return rope


class _Keys:
    """Reads the keys of a file, and collects problems."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self._beside: dict[str, Any] = {}
        self._taken: set[str] = set()
        self.problems: list[str] = []

    def also(self, key: str, value: Any) -> None:
        """Adds a key that the file has in a second place."""
        self._beside[key] = value

    def has(self, key: str) -> bool:
        """True when the file has the key, null or not."""
        return key in self._fields

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

    def take_object(self, key: str) -> Mapping[str, Any]:
        """The object of a key, empty when it is missing or null."""
        value = self.take(key, {})
        if isinstance(value, Mapping):
            return value
        self.problems.append(f"{key} is {value!r}, wanted an object")
        return {}

    def must(self, key: str, *implemented: Any, may_be_absent: bool = False) -> None:
        """Adds a problem when the key has any other value, since no other is implemented."""
        found = self.take(key, None if may_be_absent else _REQUIRED)
        if found is None or found in implemented:
            return
        only = " or ".join(map(repr, implemented))
        self.problems.append(f"{key} is {found!r}, implemented is {only or 'null'} only")

    def agreed(self, what: str, *names: str) -> Any:
        """What keys that mean the same say together; None when there is none of them."""
        said = [(name, place[name]) for place in (self._fields, self._beside) for name in names if place.get(name)]
        if any(value != said[0][1] for _, value in said):
            places = ", ".join(f"{name} {value!r}" for name, value in said)
            self.problems.append(f"the file has more than one value for {what}: {places}; leave one")
        return said[0][1] if said else None

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
