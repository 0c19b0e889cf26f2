"""The cache: what rows hold after chunks of all kinds, against lists of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import CONFIG, HYBRID

from tbx_envs.errors import ShapeError
from tbx_jax.models.cache import NO_TOKEN, append, cache_axes, empty_cache, states_of

appended = jax.jit(append)
ROOM = 24


def chunk_of(seed, rows, length):
    """Keys, values and ids; the numbers of a token say which token it is."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, CONFIG.num_layers, rows, length, CONFIG.num_kv_heads, CONFIG.head_width))
    return jnp.float32(keys), jnp.float32(values), jnp.array(rng.integers(0, 13, (rows, length)), jnp.int32)


@pytest.mark.parametrize("slots", [None, [2, 0]], ids=["every row", "some rows"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rows_hold_the_valid_tokens_of_their_chunks_in_order(slots, dtype):
    cache = empty_cache(CONFIG, 3, ROOM, dtype)
    named = slots if slots is not None else [0, 1, 2]
    held = {slot: ([], [], []) for slot in range(3)}
    for seed, counts in enumerate(([4, 0, 1], [1, 4, 3], [0, 2, 4])):
        keys, values, tokens = chunk_of(seed, len(named), 4)
        counts = counts[: len(named)]
        cache = appended(
            cache, keys, values, tokens, jnp.array(counts), None if slots is None else jnp.array(slots, jnp.int32)
        )
        for row, slot in enumerate(named):
            for parts, new in zip(held[slot], (keys[:, row], values[:, row], tokens[None, row]), strict=True):
                parts += list(np.asarray(new)[:, : counts[row]].swapaxes(0, 1))
    for slot, (keys, values, tokens) in held.items():
        length = int(cache.length_b[slot])
        assert length == len(tokens)
        stored = jnp.dtype(dtype or "float32")
        assert cache.keys_lbkhs.dtype == cache.values_lbksh.dtype == stored
        for at in range(length):
            np.testing.assert_array_equal(cache.keys_lbkhs[:, slot, ..., at], keys[at].astype(stored))
            np.testing.assert_array_equal(cache.values_lbksh[:, slot, :, at], values[at].astype(stored))
        recent = [NO_TOKEN] * CONFIG.token_shift + [int(token[0]) for token in tokens]
        np.testing.assert_array_equal(cache.recent_bm[slot], recent[-CONFIG.token_shift :])


def test_a_donated_cache_is_updated_in_place():
    cache = empty_cache(CONFIG, 3, ROOM)
    before = cache.keys_lbkhs.unsafe_buffer_pointer()
    cache = jax.jit(append, donate_argnums=0)(cache, *chunk_of(0, 3, 4), jnp.array([4, 4, 4]))
    assert cache.keys_lbkhs.unsafe_buffer_pointer() == before


def test_a_chunk_longer_than_the_cache_is_refused():
    with pytest.raises(ShapeError, match="a chunk of 4 tokens for a cache with room for 3"):
        append(empty_cache(CONFIG, 3, 3), *chunk_of(0, 3, 4), jnp.array([1, 1, 1]))


def test_a_hybrid_keeps_states_and_only_the_keys_of_its_layers_of_attention():
    config = CONFIG.model_copy(update=HYBRID)
    cache = empty_cache(config, 3, ROOM)
    assert cache.keys_lbkhs.shape == (2, 3, 2, 6, ROOM)
    assert (cache.states.inputs_lebmc.shape, cache.states.memory_lebuxy.shape) == (
        (2, 2, 3, 3, 59),
        (2, 2, 3, 3, 16, 9),
    )
    assert jax.tree.structure(cache_axes(config)) == jax.tree.structure(cache)
    full = cache._replace(states=jax.tree.map(jnp.ones_like, cache.states), length_b=jnp.array([0, 5, 1]))
    for state in states_of(full, jnp.array([2, 0])):
        assert np.all(state[:, :, 0] == 1) and np.all(state[:, :, 1] == 0)


def test_a_dense_model_keeps_no_states():
    assert empty_cache(CONFIG, 3, ROOM).states is None and states_of(empty_cache(CONFIG, 3, ROOM)) is None
