"""The decoder against loops over numbers, and each way of running it against the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_decoder import reference_logits, reference_logps
from small_model import CONFIG, VOCABULARY, random_tokens, small_model

from tbx_envs.errors import ConfigError, ShapeError
from tbx_jax import models
from tbx_jax.config import MeshConfig, RopeScaling
from tbx_jax.mesh import build_mesh, shard_tree
from tbx_jax.models import parameter_axes, unembed
from tbx_jax.models.cache import empty_cache

# Compiled as a whole: op by op the same takes many times longer.
apply = jax.jit(models.apply, static_argnames=("model", "attend_length", "remat"))
token_logps = jax.jit(models.token_logps, static_argnames=("model", "remat"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_shift": 0},
        {"qk_norm": False},
        {"tie_embeddings": False},
        {"num_kv_heads": 4, "num_layers": 1},
        {"num_kv_heads": 1, "token_shift": 1},
        {"qk_norm": False, "qkv_bias": True},
        # Of the two pairs of a head, one is stretched by a part.
        {
            "head_width": 8,
            "rope_scaling": RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=100),
        },
    ],
    ids=str,
)
def test_logits_equal_those_of_loops_over_numbers(changes):
    model, params = small_model(**changes)
    tokens = random_tokens(1, 7).tolist()
    hidden, cache = apply(model, params, jnp.array([tokens]))
    assert cache is None
    wanted = reference_logits(model.config, params, tokens)
    np.testing.assert_allclose(unembed(model, params, hidden)[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logps_equal_those_of_loops_over_numbers(temperature):
    model, params = small_model()
    tokens = random_tokens(2, 9).tolist()
    wanted = reference_logps(model.config, params, tokens, temperature)
    logps = token_logps(model, params, jnp.array([tokens]), temperature=temperature)
    np.testing.assert_allclose(logps[0], wanted, atol=1e-5)


def test_token_logps_in_pieces_equal_those_in_one_and_so_do_their_gradients(monkeypatch):
    model, params = small_model(num_layers=1)
    tokens = jnp.array(random_tokens(3, 2, 11))

    def value_and_gradient():
        loss = lambda params: jnp.sum(jnp.sin(models.token_logps(model, params, tokens)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    whole = value_and_gradient()
    monkeypatch.setattr(models, "_LOGITS_AT_ONCE", 2 * 3 * VOCABULARY)
    pieces = value_and_gradient()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), whole, pieces)


def test_recomputing_layers_changes_no_gradient():
    model, params = small_model()
    tokens = jnp.array(random_tokens(4, 2, 8))
    kept, recomputed = (
        jax.jit(jax.grad(lambda p, remat=remat: jnp.mean(models.token_logps(model, p, tokens, remat=remat))))(params)
        for remat in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, recomputed)


@pytest.mark.optimized
def test_what_comes_later_changes_nothing_before_it():
    model, params = small_model()
    tokens = random_tokens(5, 1, 10)
    changed = tokens.copy()
    changed[0, 6:] = (changed[0, 6:] + 1) % VOCABULARY
    before, after = (apply(model, params, jnp.array(ids))[0] for ids in (tokens, changed))
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    assert not np.allclose(before[0, 6:], after[0, 6:])


@pytest.mark.parametrize("token_shift", [0, 3])
def test_ragged_chunks_through_the_cache_equal_the_pass_without_one(token_shift):
    model, params = small_model(token_shift=token_shift)
    tokens = random_tokens(6, 3, 30)
    wanted = apply(model, params, jnp.array(tokens))[0]
    cache, done = empty_cache(model.config, 3, 48), np.zeros(3, int)
    for counts in ([2, 0, 7], [0, 5, 1], [8, 8, 3], [1, 1, 1], [4, 0, 8]):
        chunk = np.zeros((3, 8), np.int32)
        for row, count in enumerate(counts):
            chunk[row, :count] = tokens[row, done[row] : done[row] + count]
        valid = jnp.arange(8)[None] < jnp.array(counts)[:, None]
        reads = None if done.max() > 8 else 8
        hidden, cache = apply(model, params, jnp.array(chunk), cache=cache, valid_bt=valid, attend_length=reads)
        for row, count in enumerate(counts):
            place = slice(done[row], done[row] + count)
            np.testing.assert_allclose(hidden[row, :count], wanted[row, place], atol=1e-5)
        done += counts
        np.testing.assert_array_equal(cache.length_b, done)
    if token_shift:
        for row in range(3):
            np.testing.assert_array_equal(cache.recent_bm[row], tokens[row, done[row] - 3 : done[row]])


def test_packed_sequences_equal_separate_ones():
    model, params = small_model()
    lengths = (4, 1, 6)
    sequences = [random_tokens(7 + n, n) for n in lengths]
    packed = np.concatenate([*sequences, np.zeros(3, np.int32)])[None]
    segments = np.repeat([0, 1, 2, 3], [*lengths, 3])[None].astype(np.int32)
    hidden = apply(model, params, jnp.array(packed), segments_bt=jnp.array(segments))[0][0]
    logps = token_logps(model, params, jnp.array(packed), segments_bt=jnp.array(segments))[0]
    start = 0
    for sequence in sequences:
        place = slice(start, start := start + len(sequence))
        alone = jnp.array(np.pad(sequence, (0, packed.shape[1] - len(sequence)))[None])
        count = len(sequence)
        np.testing.assert_allclose(hidden[place], apply(model, params, alone)[0][0, :count], atol=1e-5)
        np.testing.assert_allclose(logps[place], token_logps(model, params, alone)[0, :count], atol=1e-5)
        assert logps[place][0] == 0.0


def test_a_cache_and_packing_exclude_each_other():
    model, params = small_model()
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ShapeError, match="leave one out"):
        apply(model, params, tokens, cache=empty_cache(CONFIG, 1, 8), segments_bt=tokens)
    with pytest.raises(ShapeError, match="leave them out"):
        apply(model, params, tokens, valid_bt=tokens == 0)
    with pytest.raises(ShapeError, match="a chunk of 9 tokens"):
        apply(model, params, jnp.zeros((1, 9), jnp.int32), cache=empty_cache(CONFIG, 1, 8))


def test_every_parameter_names_its_axes():
    model, params = small_model(tie_embeddings=False, qkv_bias=True)
    sizes = {"l": 2, "d": 8, "n": 4, "k": 2, "h": 4, "f": 12, "v": VOCABULARY, "m": 3}

    def check(leaf, letters):
        assert leaf.shape == tuple(sizes[letter] for letter in letters.split())

    jax.tree.map(check, params, parameter_axes(model))


def test_bfloat16_stays_near_float32_and_keeps_parameters_and_logits_in_float32():
    model, params = small_model()
    narrow, narrow_params = small_model(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow_params)} == {np.dtype("float32")}
    tokens = jnp.array(random_tokens(8, 1, 6))
    hidden = apply(narrow, narrow_params, tokens)[0]
    assert hidden.dtype == jnp.bfloat16
    assert unembed(narrow, narrow_params, hidden).dtype == jnp.float32
    np.testing.assert_allclose(hidden.astype(np.float32), apply(model, params, tokens)[0], atol=0.15)


@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"fsdp": 8}, {"b": "fsdp", "d": "fsdp"}),
        ({"fsdp": 4, "tensor": 2}, {"b": "fsdp", "d": "fsdp", "n": "tensor", "k": "tensor", "f": "tensor"}),
    ],
    ids=str,
)
def test_eight_devices_give_what_one_gives(axes, rules):
    model, params = small_model()
    mesh = build_mesh(MeshConfig(axes=axes, rules=rules))
    tokens = random_tokens(9, 8, 12)
    sharded = shard_tree(params, parameter_axes(model), mesh, rules)
    assert len(sharded["layers"]["query"].sharding.device_set) == 8
    assert sharded["layers"]["query"].addressable_shards[0].data.shape[1] == 8 // axes["fsdp"]
    spread = token_logps(model, sharded, shard_tree(tokens, "b t", mesh, rules))
    np.testing.assert_allclose(spread, token_logps(model, params, jnp.array(tokens)), atol=1e-5)


@pytest.mark.parametrize("changes", [{"num_kv_heads": 3}, {"head_width": 5}], ids=str)
def test_heads_that_do_not_go_together_are_refused(changes):
    with pytest.raises(ConfigError, match="make num_heads a multiple of num_kv_heads, head_width even"):
        small_model(**changes)
