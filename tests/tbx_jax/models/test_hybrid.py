"""The hybrid decoder against a token-by-token oracle, and each way of running it against the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_hybrid import reference_hybrid_logits
from small_model import CONFIG, HYBRID, VOCABULARY, random_tokens, small_model

from tbx_envs.errors import ConfigError, ShapeError
from tbx_jax import models
from tbx_jax.config import MeshConfig
from tbx_jax.mesh import build_mesh, shard_tree
from tbx_jax.models import append_fresh, parameter_axes, unembed, with_cache
from tbx_jax.models.cache import append, cache_axes, empty_cache

MODEL, PARAMS = small_model(**HYBRID)
apply = jax.jit(models.apply, static_argnames=("model", "attend_length", "remat"))
token_logps = jax.jit(models.token_logps, static_argnames=("model", "remat"))
TOKENS = random_tokens(0, 3, 72)


ROOM = 96  # of every cache here, so that each shape of chunk is compiled once


def assert_close(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=5e-4)


@pytest.fixture(scope="module")
def whole():
    """Hidden states of the pass without a cache."""
    return np.asarray(apply(MODEL, PARAMS, jnp.array(TOKENS))[0])


def prefilled(cache, chunks):
    """The cache and hidden states after each row took in its own ids, in a chunk of 16 or one step."""
    width = 16 if max(map(len, chunks)) > 1 else 1
    tokens, valid = np.full((3, width), 7, np.int32), np.zeros((3, width), bool)
    for row, chunk in enumerate(chunks):
        tokens[row, : len(chunk)], valid[row, : len(chunk)] = chunk, True
    hidden, cache = apply(MODEL, PARAMS, jnp.array(tokens), cache=cache, valid_bt=jnp.array(valid))
    return cache, hidden


def test_logits_equal_those_of_a_token_by_token_oracle():
    model, params = small_model(**HYBRID, tie_embeddings=False)
    tokens = random_tokens(1, 9)
    wanted = reference_hybrid_logits(model.config, params, tokens)
    assert_close(unembed(model, params, apply(model, params, jnp.array(tokens[None]))[0])[0], wanted)


def test_what_comes_later_changes_nothing_before_it(whole):
    changed = TOKENS.copy()
    changed[:, 50:] = (changed[:, 50:] + 1) % VOCABULARY
    after = apply(MODEL, PARAMS, jnp.array(changed))[0]
    assert_close(after[:, :50], whole[:, :50])
    assert np.abs(after[:, 50:] - whole[:, 50:]).max(axis=(1, 2)).min() > 0.1


def test_ragged_chunks_and_single_steps_through_the_cache_equal_the_pass_without_one(whole):
    """Padding on the right of a chunk moves no state; rows take turns with nothing at all to do."""
    cache, done = empty_cache(MODEL.config, 3, ROOM), np.zeros(3, int)
    for counts in ([2, 0, 16], [0, 5, 1], [16, 16, 3], [1, 1, 1], [1, 0, 1], [4, 0, 16]):
        places = [slice(at, at + count) for at, count in zip(done, counts, strict=True)]
        cache, hidden = prefilled(cache, [TOKENS[row, place] for row, place in enumerate(places)])
        for row, count in enumerate(counts):
            if count:
                assert_close(hidden[row, :count], whole[row, places[row]])
        done += counts
        np.testing.assert_array_equal(cache.length_b, done)


def test_some_rows_in_any_order_move_only_their_own_states(whole):
    cache, _ = prefilled(empty_cache(MODEL.config, 3, ROOM), TOKENS[:, :10])
    slots, num_new = jnp.array([2, 0]), jnp.array([5, 0])
    chunk = jnp.array(TOKENS[[2, 0], 10:18])
    hidden, fresh = jax.jit(with_cache, static_argnums=(0, 4))(MODEL, PARAMS, chunk, cache, 16, slots, num_new)
    assert_close(hidden[0, :5], whole[2, 10:15])
    moved = append_fresh(cache, fresh, chunk, num_new, slots)
    np.testing.assert_array_equal(moved.length_b, [10, 10, 15])
    for before, after in zip(cache.states, moved.states, strict=True):
        np.testing.assert_array_equal(after[:, :, :2], before[:, :, :2])
        assert not np.array_equal(after[:, :, 2], before[:, :, 2])
    _, hidden = prefilled(moved, [TOKENS[0, 10:11], TOKENS[1, 10:11], TOKENS[2, 15:16]])
    assert_close(hidden[:, 0], whole[[0, 1, 2], [10, 10, 15]])


def test_rows_that_took_in_nothing_keep_what_others_wrote_meanwhile():
    """Two dispatches that read the same cache, one kept after the other: padding of the second undoes nothing."""
    cache, _ = prefilled(empty_cache(MODEL.config, 3, ROOM), TOKENS[:, :10])
    old = models.fresh_buffer(MODEL, cache, 1)
    newer, _ = prefilled(cache, TOKENS[:, 10:11])
    kept = append_fresh(newer, old, jnp.zeros((3, 1), jnp.int32), jnp.zeros(3, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, kept.states, newer.states)


def test_a_row_of_length_zero_starts_anew_whatever_its_state_holds(whole):
    used, _ = prefilled(empty_cache(MODEL.config, 3, ROOM), TOKENS[:, 20:36])
    assert all(np.any(state) for state in used.states)
    _, hidden = prefilled(used._replace(length_b=used.length_b * 0), TOKENS[:, :16])
    assert_close(hidden, whole[:, :16])


def test_packed_sequences_equal_separate_ones(whole):
    lengths = (20, 1, 46, 5)
    packed = np.concatenate([TOKENS[0, :20], TOKENS[1, :1], TOKENS[2, :46], np.zeros(5, np.int32)])[None]
    segments = np.repeat([0, 1, 2, 3], lengths)[None].astype(np.int32)
    hidden = apply(MODEL, PARAMS, jnp.array(packed), segments_bt=jnp.array(segments))[0][0]
    for row, start, length in ((0, 0, 20), (1, 20, 1), (2, 21, 46)):
        assert_close(hidden[start : start + length], whole[row, :length])


def test_gradients_with_recomputed_layers_are_slopes():
    """Along a random direction, against the difference of two losses."""
    tokens = jnp.array(TOKENS[:1, :9])
    loss = jax.jit(lambda params: jnp.mean(models.token_logps(MODEL, params, tokens, remat=True)))
    gradients = jax.jit(jax.grad(loss))(PARAMS)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), PARAMS)
    ahead = loss(jax.tree.map(lambda leaf, part: leaf + 2e-4 * part, PARAMS, direction))
    behind = loss(jax.tree.map(lambda leaf, part: leaf - 2e-4 * part, PARAMS, direction))
    slope = sum(float(jnp.sum(a * b)) for a, b in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True))
    np.testing.assert_allclose((ahead - behind) / 4e-4, slope, rtol=0.02)


def test_every_parameter_and_every_part_of_the_cache_names_its_axes():
    model, params = small_model(**HYBRID, tie_embeddings=False)
    sizes = {"l": 2, "e": 2, "d": 8, "n": 4, "k": 2, "h": 6, "o": 12, "f": 12, "v": VOCABULARY, "b": 3, "s": 9}
    sizes |= {"c": 59, "w": 4, "u": 3, "x": 16, "y": 9}
    jax.tree.map(
        lambda leaf, letters: np.testing.assert_equal(leaf.shape, tuple(sizes[letter] for letter in letters.split())),
        params,
        parameter_axes(model),
    )
    cache = empty_cache(model.config, 3, 9)
    for leaf, letters in zip(jax.tree.leaves(cache), jax.tree.leaves(cache_axes(model.config)), strict=True):
        # `m` is the reach of token shift in one array and that of the convolution in another.
        shape = tuple(sizes.get(letter) for letter in letters.split())
        assert all(size in (None, given) for size, given in zip(shape, leaf.shape, strict=True))


def test_eight_devices_give_what_one_gives(whole):
    rules = {"d": "fsdp", "f": "tensor", "n": "tensor", "k": "tensor"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 4, "tensor": 2}, rules=rules))
    sharded = shard_tree(PARAMS, parameter_axes(MODEL), mesh, rules)
    assert sharded["layers"]["delta"]["gate"].addressable_shards[0].data.shape == (2, 2, 2, 6)
    assert_close(apply(MODEL, sharded, shard_tree(TOKENS, "b t", mesh, {}))[0], whole)


def test_bfloat16_keeps_the_memory_in_float32():
    narrow, _ = small_model(**HYBRID, dtype="bfloat16")
    cache = empty_cache(narrow.config, 3, 16)
    hidden, cache = jax.eval_shape(lambda ids: models.apply(narrow, PARAMS, ids, cache=cache), TOKENS[:, :16])
    assert hidden.dtype == jnp.bfloat16
    assert [leaf.dtype.name for leaf in cache.states] == ["bfloat16", "float32"]


def test_a_cache_of_another_kind_of_model_is_refused():
    keys = jnp.zeros((2, 3, 1, 2, 6))
    with pytest.raises(ShapeError, match="give both"):
        append(empty_cache(MODEL.config, 3, 8), keys, keys, jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))


def test_sizes_that_do_not_go_together_are_all_in_one_message():
    hybrid = HYBRID["hybrid"].model_copy(update={"key_heads": 2, "rotary_width": 9})
    config = CONFIG.model_copy(update=HYBRID | {"num_layers": 5, "hybrid": hybrid})
    with pytest.raises(ConfigError) as error:
        models.abstract(config, VOCABULARY)
    for part in ("num_layers 5 is not a multiple of 3", "value_heads 3 is not", "rotary_width 9 is not an even number"):
        assert part in str(error.value)
