"""A model small enough for loops, with parameters far from their initial values, so that no part of it is idle."""

import jax
import jax.numpy as jnp
import numpy as np

from tbx_jax.config import HybridConfig, ModelConfig, SamplingConfig
from tbx_jax.keys import key_for
from tbx_jax.models import build

VOCABULARY = 13
CONFIG = ModelConfig(
    num_layers=2,
    width=8,
    num_heads=4,
    num_kv_heads=2,
    head_width=4,
    mlp_width=12,
    rope_theta=100.0,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
    hybrid=None,
    token_shift=3,
    max_length=512,
    dtype="float32",
)
# Two periods of two delta layers and one of attention; no two sizes are alike. Keys and reads of a delta layer are
# brought to length one however short they are, which magnifies rounding: narrow heads and a small epsilon more so.
HYBRID = {
    "num_layers": 6,
    "norm_eps": 1e-3,
    "token_shift": 0,
    "head_width": 6,
    "hybrid": HybridConfig(
        delta_layers=2, rotary_width=2, conv_taps=4, key_heads=1, value_heads=3, key_width=16, value_width=9
    ),
}
SAMPLING = SamplingConfig(
    temperature=1.0,
    top_k=None,
    top_p=1.0,
    max_turn_tokens=12,
    max_episode_tokens=96,
    slots=6,
    decode_steps=4,
    episodes=None,
    cache_dtype=None,
)

# Changes of CONFIG that make a hybrid of it.
HYBRID_SIZES = {
    "num_layers": 2,
    "token_shift": 0,
    "hybrid": HybridConfig(
        delta_layers=1, rotary_width=4, conv_taps=3, key_heads=1, value_heads=2, key_width=4, value_width=4
    ),
}


def small_model(vocabulary=VOCABULARY, **changes):
    """Model and parameters; every parameter is moved by noise, also those that start at zero or one."""
    model, params = build(CONFIG.model_copy(update=changes), vocabulary, key_for(0, "parameters"))
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    # Added outside of JAX, which would compile a program for each shape.
    moved = [
        jnp.array(leaf + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32)) for leaf in map(np.asarray, leaves)
    ]
    return model, jax.tree.unflatten(treedef, moved)


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape).astype(np.int32)
