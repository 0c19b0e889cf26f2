"""The shipped policy computes what it computed when its figures were published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbx_jax import models
from tbx_jax.policies.weights import load_policy

# Log-probabilities of every sixth of 48 fixed ids, and logits after the last; written down at version 0.1.
LOGPS = [-4.9407, -7.2766, -8.777, -14.6055, -9.1648, -9.3678, -15.0462, -8.7116]
LOGITS = [-3.3478, -0.7944, -3.3302, -3.4261, 0.9491, -3.3547]


@pytest.mark.optimized
def test_nano_gives_the_numbers_of_the_published_figures():
    model, params, _ = load_policy("nano")
    tokens = ((jnp.arange(48, dtype=jnp.int32) * 37 + 11) % model.vocabulary)[None]
    logps = jax.jit(models.token_logps, static_argnums=0)(model, params, tokens)[0]
    np.testing.assert_allclose(logps[1::6], LOGPS, atol=2e-4)
    logits = models.unembed(model, params, jax.jit(models.apply, static_argnums=0)(model, params, tokens)[0])[0, -1]
    np.testing.assert_allclose(logits[:6], LOGITS, atol=2e-4)
    assert int(logits.argmax()) == 522
