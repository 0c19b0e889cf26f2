"""A model small enough for loops, with parameters far from their initial values, so that no part of it is idle."""

import jax
import numpy as np

from tbx_jax.config import ModelConfig, SamplingConfig
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
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    token_shift=3,
    max_length=512,
    dtype="float32",
)
SAMPLING = SamplingConfig(
    temperature=1.0, top_k=None, top_p=1.0, max_turn_tokens=12, max_episode_tokens=96, slots=6, decode_steps=4
)


def small_model(**changes):
    """Model and parameters; every parameter is moved by noise, also those that start at zero or one."""
    model, params = build(CONFIG.model_copy(update=changes), VOCABULARY, key_for(0, "parameters"))
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = [leaf + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    return model, jax.tree.unflatten(treedef, moved)


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape).astype(np.int32)
