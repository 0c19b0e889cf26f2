"""Draws against the probabilities they are meant to have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from tbx_jax.keys import key_for
from tbx_jax.sampler.sampling import gumbel_noise, sample, truncate

LOGITS = [1.0, 0.2, -0.5, 2.0, 2.0, -3.0]
_sample = jax.jit(sample, static_argnames=("top_k", "top_p"))
_noise = jax.jit(gumbel_noise, static_argnames="vocabulary")
PLAIN = {"temperature": 1.0, "top_k": None, "top_p": 1.0}


def softmax(logits):
    weights = np.exp(np.array(logits) - np.max(logits))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [0, 3, 4]),
        ({"top_p": 0.8}, [0, 3, 4]),
        ({"top_k": 2, "top_p": 0.4}, [3, 4]),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities_and_logps_are_of_the_whole_distribution(changes, kept):
    draws = 20_000
    kinds = PLAIN | changes
    noise = _noise(jax.random.split(key_for(0, "draws"), draws), vocabulary=len(LOGITS))
    temperatures = jnp.full(draws, kinds["temperature"])
    tokens, logps = _sample(
        jnp.tile(jnp.array(LOGITS), (draws, 1)), temperatures, noise, top_k=kinds["top_k"], top_p=kinds["top_p"]
    )
    counts = np.bincount(tokens, minlength=len(LOGITS))
    whole = softmax(np.array(LOGITS) / kinds["temperature"])
    assert counts.nonzero()[0].tolist() == kept
    wanted = whole[kept] / whole[kept].sum()
    assert scipy.stats.chisquare(counts[kept], draws * wanted).pvalue > 1e-3
    np.testing.assert_allclose(logps, np.log(whole)[np.array(tokens)], atol=1e-5)


@pytest.mark.parametrize("with_noise", [True, False])
def test_temperature_zero_takes_the_most_likely_token_with_its_logp_at_temperature_one(with_noise):
    logits = jnp.array([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    noise = 9.0 * _noise(jax.random.split(key_for(0), 2), vocabulary=3) if with_noise else None
    tokens, logps = _sample(logits, jnp.zeros(2), noise, top_k=None, top_p=1.0)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(logps, [np.log(softmax(row)).max() for row in np.array(logits)], atol=1e-6)


def test_rows_have_temperatures_of_their_own():
    logits = jnp.tile(jnp.array(LOGITS), (3, 1))
    noise = _noise(jax.random.split(key_for(0, "rows"), 3), vocabulary=len(LOGITS))
    tokens, logps = _sample(logits, jnp.array([0.0, 0.5, 2.0]), noise, top_k=None, top_p=1.0)
    for row, temperature in enumerate((1.0, 0.5, 2.0)):
        wanted = np.log(softmax(np.array(LOGITS) / temperature))[int(tokens[row])]
        np.testing.assert_allclose(logps[row], wanted, atol=1e-6)


def test_noise_makes_the_draw_that_jax_makes_of_the_same_key():
    keys = jax.random.split(key_for(0, "categorical"), 50)
    wanted = jax.vmap(lambda key: jax.random.categorical(key, jnp.array(LOGITS)))(keys)
    noise = _noise(keys.reshape(5, 10), vocabulary=len(LOGITS)).reshape(50, -1)
    tokens, _ = _sample(jnp.tile(jnp.array(LOGITS), (50, 1)), jnp.ones(50), noise, top_k=None, top_p=1.0)
    assert tokens.tolist() == wanted.tolist()


def test_truncation_keeps_the_smallest_likely_set_and_at_least_one_token():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    kept = lambda **kinds: jnp.isfinite(truncate(logits, **{"top_k": None, "top_p": 1.0, **kinds}))[0].tolist()  # noqa: E731
    assert kept(top_p=0.1) == [True, False, False, False]
    assert kept(top_p=0.6) == [True, True, False, False]
    assert kept(top_p=0.9) == [True, True, True, False]
    assert kept(top_k=9) == [True, True, True, True]
    # Of the two that top-k leaves, the first has 0.625: top-p counts after it.
    assert kept(top_k=2, top_p=0.6) == [True, False, False, False]


def test_tokens_as_likely_as_the_last_one_kept_stay_too():
    logits = jnp.array([[1.0, 0.0, 0.0, -1.0]])
    assert jnp.isfinite(truncate(logits, top_k=2, top_p=1.0))[0].tolist() == [True, True, True, False]
