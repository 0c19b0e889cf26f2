"""Losses: functions of arrays that return a sum over trained tokens, divided by a given normaliser.

The normaliser is the number of trained tokens of the whole global batch. So losses, gradients and means of
micro-batches add up, and every trained token has the same weight, whatever micro-batch it is in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Bound of a token's |log ratio| before the exponential: e^20 is 4.9e8. Without one e^89 is infinite in float32, and the
# gradient of a clipped token zero times infinity; at e^44 already the square of a gradient is infinite in its norm.
LARGEST_LOG_RATIO = 20.0


class PolicyMetrics(NamedTuple):
    """Metrics of a policy update; `merge_metrics` merges those of micro-batches.

    Attributes:
        loss: the scalar that was minimised.
        clip_fraction: share of trained tokens whose ratio lies beyond the clip that applies to them.
        approx_kl: estimate of KL(behavior || trained) in nats per token, mean of (ratio - 1) - log ratio.
        ratio_max: largest pi / pi_behavior of a trained token, at most exp(`LARGEST_LOG_RATIO`), as in `approx_kl`.
        logp_gap_mean: mean |logp - logp_behavior|. Before the first optimizer step on a batch this is the
            disagreement between sampler and learner, which should be rounding only.
        logp_gap_max: the largest such gap.
        entropy: mean -logp of the trained tokens: an unbiased estimate of the entropy at temperature 1, in nats.
    """

    loss: Float[Array, ""]
    clip_fraction: Float[Array, ""]
    approx_kl: Float[Array, ""]
    ratio_max: Float[Array, ""]
    logp_gap_mean: Float[Array, ""]
    logp_gap_max: Float[Array, ""]
    entropy: Float[Array, ""]


def merge_metrics(a: PolicyMetrics, b: PolicyMetrics) -> PolicyMetrics:
    """Metrics of two micro-batches of one batch: means add up (one normaliser), the others are maxima."""
    return PolicyMetrics(
        loss=a.loss + b.loss,
        clip_fraction=a.clip_fraction + b.clip_fraction,
        approx_kl=a.approx_kl + b.approx_kl,
        ratio_max=jnp.maximum(a.ratio_max, b.ratio_max),
        logp_gap_mean=a.logp_gap_mean + b.logp_gap_mean,
        logp_gap_max=jnp.maximum(a.logp_gap_max, b.logp_gap_max),
        entropy=a.entropy + b.entropy,
    )


def clipped_policy_loss(
    logp_bt: Float[Array, "b t"],
    logp_behavior_bt: Float[Array, "b t"],
    advantage_b: Float[Array, "b"],
    loss_mask_bt: Bool[Array, "b t"],
    num_trained: Float[Array, ""],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, ""], PolicyMetrics]:
    """Clipped surrogate over the tokens the policy wrote, averaged over tokens of the global batch.

    Equation 7 of PPO, one advantage per sequence, with a clip of its own on each side (clip-higher, DAPO
    section 3.1) and averaged over tokens rather than over sequences (DAPO section 3.3), so long episodes
    weigh more. With `dual_clip`, the cost of a token with a negative advantage is at most `dual_clip` times the
    advantage's size, however large the ratio. Beyond `LARGEST_LOG_RATIO` the loss is constant: such a token has no
    gradient.

    Args:
        logp_bt: log pi(token) under the parameters being trained, in nats, at the sampling temperature.
        logp_behavior_bt: the same under the parameters that sampled, in nats.
        advantage_b: one advantage per sequence; not differentiated through.
        loss_mask_bt: True where the policy wrote the token (never on prompts, tool results or padding).
        num_trained: number of trained tokens of the whole global batch, of which this may be one micro-batch.
        clip_low: lower clip distance; the ratio is kept above 1 - clip_low.
        clip_high: upper clip distance; the ratio is kept below 1 + clip_high.
        dual_clip: None, or the bound (more than 1) for negative advantages.

    Returns:
        Scalar to minimise and its metrics. Zero, with a zero gradient, when no token is trained.

    Sources:
        PPO https://arxiv.org/abs/1707.06347, DAPO https://arxiv.org/abs/2503.14476,
        dual clip https://arxiv.org/abs/1912.09729
    """
    advantage_b1 = jax.lax.stop_gradient(advantage_b)[:, None]
    # Masked positions get log ratio 0 before the exponential: an infinity there would give 0 * inf in the gradient.
    difference_bt = jnp.where(loss_mask_bt, logp_bt - jax.lax.stop_gradient(logp_behavior_bt), 0.0)
    log_ratio_bt = jnp.clip(difference_bt, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio_bt = jnp.exp(log_ratio_bt)
    clipped_bt = jnp.clip(ratio_bt, 1.0 - clip_low, 1.0 + clip_high)
    cost_bt = -jnp.minimum(ratio_bt * advantage_b1, clipped_bt * advantage_b1)
    if dual_clip is not None:
        cost_bt = jnp.where(advantage_b1 < 0.0, jnp.minimum(cost_bt, -dual_clip * advantage_b1), cost_bt)
    loss = token_mean(cost_bt, loss_mask_bt, num_trained)

    beyond_bt = jnp.where(advantage_b1 > 0.0, ratio_bt > 1.0 + clip_high, ratio_bt < 1.0 - clip_low)
    beyond_bt &= advantage_b1 != 0.0
    gap_bt = jnp.abs(difference_bt)
    metrics = PolicyMetrics(
        loss=loss,
        clip_fraction=token_mean(beyond_bt.astype(loss.dtype), loss_mask_bt, num_trained),
        approx_kl=token_mean(jnp.expm1(log_ratio_bt) - log_ratio_bt, loss_mask_bt, num_trained),
        ratio_max=jnp.max(jnp.where(loss_mask_bt, ratio_bt, 0.0)),
        logp_gap_mean=token_mean(gap_bt, loss_mask_bt, num_trained),
        logp_gap_max=jnp.max(jnp.where(loss_mask_bt, gap_bt, 0.0)),
        entropy=token_mean(-logp_bt, loss_mask_bt, num_trained),
    )
    return loss, jax.lax.stop_gradient(metrics)


def sft_loss(
    logp_bt: Float[Array, "b t"], loss_mask_bt: Bool[Array, "b t"], num_trained: Float[Array, ""]
) -> Float[Array, ""]:
    """SFT loss: mean negative log-likelihood (nats) of the trained tokens of the global batch."""
    return token_mean(-logp_bt, loss_mask_bt, num_trained)


def token_mean(
    value_bt: Float[Array, "b t"], mask_bt: Bool[Array, "b t"], num_tokens: Float[Array, ""]
) -> Float[Array, ""]:
    """Sum of the values where `mask_bt` is True, divided by `num_tokens`, in float32; zero when none is True."""
    total = jnp.sum(jnp.where(mask_bt, value_bt, 0.0), dtype=jnp.float32)
    return total / jnp.maximum(num_tokens, 1.0)
