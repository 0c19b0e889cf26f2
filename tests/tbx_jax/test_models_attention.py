"""Attention against the library's own, and the choice between the two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbx_jax.models import attention as module
from tbx_jax.models.attention import Fresh, attention, cudnn_applies


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
