"""From logits to a token: temperature, truncation, one draw per row. Pure functions.

The log-probability of a sampled token is that of the *whole* distribution at the sampling temperature,
log_softmax(logits / T), also where top-k or top-p kept only some tokens. The learner computes the same from its own
logits, so the ratio of the two is 1 when the parameters are the same.

A draw is the largest of logits plus Gumbel noise, as in `jax.random.categorical`, with the noise drawn separately: that
of several steps can be drawn at once, and a row at temperature 0 needs none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def gumbel_noise(key_b: Key[Array, "*b"], vocabulary: int) -> Float[Array, "*b v"]:
    """Noise for one draw per key, a function of the key alone."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,), jnp.float32))(key_b.reshape(-1))
    return noise.reshape(*key_b.shape, vocabulary)


def sample(
    logits_bv: Float[Array, "b v"],
    temperature_b: Float[Array, "b"],
    noise_bv: Float[Array, "b v"] | None,
    *,
    top_k: int | None,
    top_p: float,
) -> tuple[Int[Array, "b"], Float[Array, "b"]]:
    """One token per row, and its log-probability.

    Args:
        logits_bv: logits in float32, before temperature.
        temperature_b: divisor of the logits; 0 takes the most likely token, with its log-probability at temperature 1.
        noise_bv: noise from `gumbel_noise`, a key per row, so that a row's token does not depend on other rows. None
            takes the most likely token in every row.
        top_k, top_p: as in `truncate`.

    Returns:
        Token ids, and log pi(token) in nats at the sampling temperature, without truncation.
    """
    draws_b1 = (temperature_b > 0)[:, None]
    logits_bv = logits_bv / jnp.where(draws_b1, temperature_b[:, None], 1.0)
    if noise_bv is None:
        token_b = jnp.argmax(logits_bv, axis=-1)
    else:
        kept_bv = truncate(logits_bv, top_k=top_k, top_p=top_p)
        token_b = jnp.argmax(kept_bv + jnp.where(draws_b1, noise_bv, 0.0), axis=-1)
    return token_b.astype(jnp.int32), logp_of(logits_bv, token_b)


def logp_of(logits_bv: Float[Array, "b v"], token_b: Int[Array, "b"]) -> Float[Array, "b"]:
    """log softmax(logits) at each row's token."""
    chosen_b = jnp.take_along_axis(logits_bv, token_b[:, None], axis=-1)[:, 0]
    return chosen_b - jax.nn.logsumexp(logits_bv, axis=-1)


def truncate(logits_bv: Float[Array, "b v"], *, top_k: int | None, top_p: float) -> Float[Array, "b v"]:
    """Logits with -inf for the tokens that must not be drawn: top-k first, then top-p of the remaining tokens.

    Args:
        top_k: number of most likely tokens to keep, with ties of the k-th; None keeps all.
        top_p: probability of the smallest set of most likely tokens to keep; 1.0 keeps all.
    """
    if top_k is not None and top_k < logits_bv.shape[-1]:
        lowest_b1 = jax.lax.top_k(logits_bv, top_k)[0][:, -1:]
        logits_bv = jnp.where(logits_bv >= lowest_b1, logits_bv, -jnp.inf)
    if top_p < 1.0:
        sorted_bv = jnp.sort(logits_bv, axis=-1, descending=True)
        probability_bv = jax.nn.softmax(sorted_bv, axis=-1)
        before_bv = jnp.cumsum(probability_bv, axis=-1) - probability_bv
        lowest_b1 = jnp.min(jnp.where(before_bv < top_p, sorted_bv, jnp.inf), axis=-1, keepdims=True)
        logits_bv = jnp.where(logits_bv >= lowest_b1, logits_bv, -jnp.inf)
    return logits_bv
