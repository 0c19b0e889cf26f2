"""`config.json` of published models: read as transformers reads it, or refused by name."""

import itertools
import math

import jax
import pytest
import transformers
from published_configs import NUM_PARAMETERS, PUBLISHED

from tbx_envs.errors import CheckpointError
from tbx_jax.models import abstract
from tbx_jax.models.hub_config import hub_type, read_config

CLASSES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_5": transformers.Qwen3_5Config,
}


def theirs(fields):
    """The same file as transformers reads it: the language model's part, and whether the embedding is tied."""
    config = CLASSES[fields["model_type"]](**{key: value for key, value in fields.items() if key != "model_type"})
    return config.get_text_config(), config.tie_word_embeddings


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load_with_the_sizes_that_transformers_reads(name):
    config, vocabulary = read_config(PUBLISHED[name])
    text, tied = theirs(PUBLISHED[name])
    rope = text.rope_parameters
    heads = text.num_attention_heads
    assert (config.num_layers, config.width, config.mlp_width, vocabulary, config.max_length) == (
        text.num_hidden_layers,
        text.hidden_size,
        text.intermediate_size,
        text.vocab_size,
        text.max_position_embeddings,
    )
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    assert (config.num_heads, config.num_kv_heads, config.head_width) == (heads, text.num_key_value_heads, width)
    assert (config.rope_theta, config.norm_eps, config.tie_embeddings) == (rope["rope_theta"], text.rms_norm_eps, tied)
    assert (config.rope_scaling is not None) == (rope["rope_type"] == "llama3") and config.dtype == "bfloat16"
    if config.rope_scaling is not None:
        assert config.rope_scaling.factor == rope["factor"] and config.rope_scaling.original_length == 8192
    if config.hybrid is None:
        assert hub_type(config) == text.model_type
    else:
        assert config.hybrid.rotary_width == width * rope["partial_rotary_factor"]
        assert config.attention_layers == text.layer_types.count("full_attention")
        assert config.hybrid.value_heads == text.linear_num_value_heads


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_published_configurations_make_models_with_the_published_number_of_parameters(name):
    _, shapes = abstract(*read_config(PUBLISHED[name]))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == NUM_PARAMETERS[name]


LLAMA, QWEN2, QWEN3 = (PUBLISHED[name] for name in ("Llama-3.2-1B-Instruct", "Qwen2.5-0.5B", "Qwen3-0.6B"))
HYBRID = PUBLISHED["Qwen3.5-0.8B"]


def with_text(**changes):
    return HYBRID | {"text_config": HYBRID["text_config"] | changes}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (with_text(output_gate_type="sigmoid"), "output_gate_type is 'sigmoid', implemented is 'swish' or 'silu' only"),
        (with_text(mlp_only_layers=[3]), r"mlp_only_layers is \[3\]"),
        (QWEN2 | {"use_mrope": True}, "use_mrope is True"),
        (with_text(attention_bias=True), "attention_bias is True"),
        (with_text(use_bidirectional_attention=True), "unknown keys: use_bidirectional_attention"),
        (HYBRID | {"quantization_config": {"bits": 8}}, r"quantization_config is .* beside text_config and not read"),
        (HYBRID | {"hidden_size": 2048}, "hidden_size is 2048 beside text_config and 1024 in it"),
        (HYBRID | {"rope_scaling": {"type": "yarn"}}, "rope_scaling is .* beside text_config"),
        (HYBRID | {"text_config": None}, "needs text_config, an object; it is None"),
        (with_text(model_type="qwen3_5_moe_text"), "text_config is of model_type 'qwen3_5_moe_text'"),
        (
            with_text(tie_word_embeddings=False),
            "tie_word_embeddings is True for the composite and False in text_config",
        ),
        (with_text(torch_dtype="float32"), "more than one value for the type of the computation: dtype 'bfloat16'"),
        (with_text(partial_rotary_factor=0.5), "partial_rotary_factor is 0.25 in rope_parameters and 0.5 beside it"),
        (with_text(full_attention_interval=3), "layer_types must repeat"),
        (LLAMA | {"dtype": "float32"}, "dtype 'float32', torch_dtype 'bfloat16'; leave one"),
        (LLAMA | {"rope_scaling": {"rope_type": "default", "type": "linear"}}, "by rope_type and 'linear' by type"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1.0 in rope_parameters and 500000.0 beside"),
        (QWEN2 | {"rope_scaling": [8.0]}, r"rope_scaling is \[8.0\], wanted an object"),
        (QWEN3 | {"layer_types": {"full_attention": 28}}, "layer_types has {'full_attention': 28}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_result_is_refused_by_name(fields, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(fields)


SCALING = LLAMA["rope_scaling"]
ROPES = (
    None,
    {},
    {"rope_type": "default"},
    {"type": "default", "rope_theta": 500000.0},
    SCALING,
    SCALING | {"rope_theta": 500000.0},
    SCALING | {"factor": 4.0, "rope_theta": 10000.0},
    {key: value for key, value in SCALING.items() if key != "original_max_position_embeddings"},
)


def test_rotary_positions_are_those_of_transformers_or_refused_wherever_the_keys_stand():
    """All pairs of `rope_scaling` and `rope_parameters`, with a base beside them or none."""
    refused = 0
    for scaling, parameters, theta in itertools.product(ROPES, ROPES, (None, 10000.0, 500000.0)):
        given = {"rope_scaling": scaling, "rope_parameters": parameters, "rope_theta": theta}
        given = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
        fields = {**LLAMA, **{key: value for key, value in given.items() if value is not None}}
        fields = {key: value for key, value in fields.items() if key not in given or given[key] is not None}
        try:
            config, _ = read_config(fields)
        except CheckpointError:
            refused += 1
            continue
        rope = theirs(fields)[0].rope_parameters
        assert config.rope_theta == rope["rope_theta"], given
        assert (config.rope_scaling is not None) == (rope["rope_type"] == "llama3"), given
        if config.rope_scaling is not None:
            read = config.rope_scaling.factor, config.rope_scaling.original_length
            assert read == (rope["factor"], rope["original_max_position_embeddings"]), given
    assert 0 < refused < len(ROPES) ** 2 * 3
    agreeing = LLAMA | {"rope_parameters": SCALING | {"rope_theta": 500000.0}}
    assert read_config(agreeing) == read_config(LLAMA)


@pytest.mark.parametrize("published", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "tie_word_embeddings"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_a_key_that_is_not_there_means_what_it_means_to_transformers_or_is_missed(published, key, how):
    fields = {name: value for name, value in published.items() if name != key} | ({key: None} if how == "null" else {})
    try:
        config, _ = read_config(fields)
    except CheckpointError as error:
        assert f"{key} is missing" in str(error)
        return
    text, tied = theirs(
        {name: value for name, value in fields.items() if value is not None or name != "tie_word_embeddings"}
    )
    assert config.num_kv_heads == text.num_key_value_heads and config.tie_embeddings == bool(tied)
    assert config.head_width == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_what_transformers_itself_writes_with_all_its_defaults_is_read(name):
    fields = CLASSES[name](rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}).to_dict()
    config, vocabulary = read_config(fields | {"model_type": name})
    assert (config.num_layers, vocabulary) == (fields["num_hidden_layers"], fields["vocab_size"])
