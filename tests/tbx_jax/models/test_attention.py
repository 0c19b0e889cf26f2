"""Attention against the library's own, and the choice between the two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbx_jax.models import attention as module
from tbx_jax.models.attention import Fresh, InPlace, attention, cudnn_applies


def heads(seed, t=10, n=4, k=2, h=8, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.array(rng.standard_normal((2, t, heads, h)), dtype) for heads in (n, k, k)]


def test_causal_attention_equals_the_library():
    query, key, value = heads(0)
    wanted = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
    np.testing.assert_allclose(attention(query, Fresh(key, value), None, None, None), wanted, atol=1e-6)


def test_masked_attention_equals_the_library():
    query, key, value = heads(1)
    segments = jnp.array([[0] * 3 + [1] * 7, [4] * 10])
    mask = jnp.tril(jnp.ones((10, 10), bool))[None] & (segments[:, :, None] == segments[:, None, :])
    wanted = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")
    np.testing.assert_allclose(attention(query, Fresh(key, value), mask, None, None), wanted, atol=1e-6)


def by_loops(query_btnh, fresh, keys_ckhs, values_cksh, slots, lengths):
    """Softmax over the tokens of a row and the fresh ones up to the query's own, number by number in float64."""
    mixed = np.zeros(query_btnh.shape)
    for b, t, n in np.ndindex(*query_btnh.shape[:3]):
        k = n // (query_btnh.shape[2] // keys_ckhs.shape[1])
        old = range(lengths[b])
        keys = [keys_ckhs[slots[b], k, :, s] for s in old] + [fresh.keys_lbjkh[b, j, k] for j in range(t + 1)]
        values = [values_cksh[slots[b], k, s] for s in old] + [fresh.values_lbjkh[b, j, k] for j in range(t + 1)]
        query = np.float64(query_btnh[b, t, n]) / np.sqrt(query_btnh.shape[3])
        weights = np.exp([query @ np.float64(key) for key in keys])
        mixed[b, t, n] = weights @ np.float64(values) / weights.sum()
    return mixed


@pytest.mark.parametrize("slots", [None, [3, 0]], ids=str)
@pytest.mark.parametrize("lengths", [(0, 0), (1, 0), (7, 8), (9, 2), (19, 16), (20, 5)], ids=str)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_cache_read_in_place_counts_as_far_as_each_row_goes(slots, lengths, stored, monkeypatch):
    """Blocks of 8 in a cache of 20, so that the last block begins inside the one before it."""
    monkeypatch.setattr(module, "_BLOCK", 8)
    query, key, value = heads(5, t=3)
    rng = np.random.default_rng(6)
    rows = 2 if slots is None else 4
    keys = jnp.array(3 * rng.standard_normal((3, rows, 2, 8, 20)), stored)
    values = jnp.array(rng.standard_normal((3, rows, 2, 20, 8)), stored)
    slot_b = None if slots is None else jnp.array(slots)
    cached = InPlace(keys, values, slot_b, jnp.array(lengths), layer=1)
    assert int(cached.num_blocks) == -(-max(lengths) // 8)
    wanted = by_loops(query, Fresh(key, value), keys[1], values[1], slots or [0, 1], lengths)
    np.testing.assert_allclose(attention(query, Fresh(key, value), None, cached, None), wanted, atol=3e-6)


@pytest.mark.parametrize(
    ("changes", "masked", "capability", "applies"),
    [
        ({}, False, "8.0", True),
        ({}, True, "8.0", True),
        ({"t": 11}, True, "8.0", False),
        ({"t": 11}, False, "8.0", True),
        ({}, False, "7.5", False),
        ({"dtype": "float32"}, False, "9.0", False),
        ({"h": 12}, False, "9.0", False),
        ({"h": 256}, False, "8.0", False),
        ({"h": 256}, False, "9.0", True),
    ],
    ids=str,
)
def test_the_fused_kernel_is_chosen_where_it_takes_the_arrays(changes, masked, capability, applies, monkeypatch):
    class Device:
        compute_capability = capability

    query = heads(2, **({"dtype": "bfloat16"} | changes))[0]
    monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module.jax, "local_devices", lambda: [Device()])
    mask = jnp.ones((1, query.shape[1], query.shape[1]), bool) if masked else None
    assert cudnn_applies(query, mask) is applies


def test_no_fused_kernel_on_a_cpu():
    assert not cudnn_applies(heads(3, dtype="bfloat16")[0], None)


@pytest.mark.device
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: cuDNN runs nowhere else")
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_kernel_gives_what_our_code_gives_gradients_included(masked, monkeypatch):
    query, key, value = heads(4, t=64, h=64, dtype="bfloat16")
    mask = jnp.tril(jnp.ones((64, 64), bool))[None] if masked else None

    def value_and_gradients():
        def loss(query, key, value):
            return jnp.sum(jnp.sin(attention(query, Fresh(key, value), mask, None, None).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    assert cudnn_applies(query, mask)
    fused = value_and_gradients()
    monkeypatch.setattr(module, "cudnn_applies", lambda *_: False)
    for got, wanted in zip(jax.tree.leaves(fused), jax.tree.leaves(value_and_gradients()), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), atol=0.05, rtol=0.05)
