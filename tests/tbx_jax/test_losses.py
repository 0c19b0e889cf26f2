"""Losses against loops without arrays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbx_jax.losses import LARGEST_LOG_RATIO, PolicyMetrics, clipped_policy_loss, merge_metrics, sft_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def random_batch(seed=0, b=5, t=7):
    generator = np.random.default_rng(seed)
    return (
        jnp.asarray(generator.normal(-1.0, 0.6, (b, t)), jnp.float32),
        jnp.asarray(generator.normal(-1.0, 0.6, (b, t)), jnp.float32),
        jnp.asarray(generator.normal(0.0, 1.0, b), jnp.float32),
        jnp.asarray(generator.random((b, t)) < 0.6),
    )


def loss_by_loop(logp_bt, logp_behavior_bt, advantage_b, loss_mask_bt, *, clip_low, clip_high, dual_clip):
    total, trained, clipped = 0.0, 0, 0
    rows = zip(logp_bt, logp_behavior_bt, advantage_b, loss_mask_bt, strict=True)
    for logps, behaviors, advantage, masks in rows:
        advantage = float(advantage)
        for logp, behavior, is_trained in zip(logps, behaviors, masks, strict=True):
            if not is_trained:
                continue
            trained += 1
            ratio = math.exp(float(logp) - float(behavior))
            objective = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
            if dual_clip is not None and advantage < 0:
                objective = max(objective, dual_clip * advantage)
            total -= objective
            clipped += ratio > 1 + clip_high if advantage > 0 else ratio < 1 - clip_low
    return total / trained, clipped / trained


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clipped_policy_loss_equals_a_loop_over_tokens(seed, dual_clip):
    batch = random_batch(seed)
    loss, metrics = clipped_policy_loss(*batch, jnp.float32(batch[3].sum()), **CLIPS, dual_clip=dual_clip)
    wanted, clip_fraction = loss_by_loop(*batch, **CLIPS, dual_clip=dual_clip)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert metrics.clip_fraction == pytest.approx(clip_fraction)


def test_clipped_policy_loss_of_one_token_is_the_hand_worked_number():
    # ratio e^0.5 = 1.6487 is clipped to 1.28; advantage 2, so the loss is -2.56
    loss, metrics = clipped_policy_loss(
        jnp.array([[-0.5]]),
        jnp.array([[-1.0]]),
        jnp.array([2.0]),
        jnp.array([[True]]),
        jnp.float32(1),
        **CLIPS,
    )
    assert loss == pytest.approx(-2.56)
    assert metrics.ratio_max == pytest.approx(math.exp(0.5))
    assert metrics.logp_gap_max == pytest.approx(0.5)
    assert metrics.approx_kl == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert metrics.entropy == pytest.approx(0.5)


def test_masked_tokens_have_no_gradient_even_where_their_ratio_overflows():
    logp_bt, logp_behavior_bt, advantage_b, loss_mask_bt = random_batch()
    logp_behavior_bt = jnp.where(loss_mask_bt, logp_behavior_bt, -1e4)
    gradient_bt = jax.grad(
        lambda logp: clipped_policy_loss(
            logp, logp_behavior_bt, advantage_b, loss_mask_bt, jnp.float32(loss_mask_bt.sum()), **CLIPS
        )[0]
    )(logp_bt)
    assert np.all(np.asarray(gradient_bt)[~np.asarray(loss_mask_bt)] == 0.0)
    assert np.isfinite(np.asarray(gradient_bt)).all()


def slope(logp, behavior, advantage, dual_clip):
    """d loss / d logp of one token, case by case, in Python's numbers."""
    if abs(logp - behavior) > LARGEST_LOG_RATIO:
        return 0.0  # the loss is constant there
    ratio = math.exp(logp - behavior)
    if advantage > 0:
        follows = ratio < 1 + CLIPS["clip_high"]
    else:
        follows = ratio > 1 - CLIPS["clip_low"] and (dual_clip is None or ratio < dual_clip)
    return -ratio * advantage if follows else 0.0


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradients_are_those_of_each_case_however_far_apart_the_two_log_probabilities_are(dual_clip):
    """-1 against -95 at sampling is a ratio of e^94, infinite in float32, though the loss is clipped."""
    pairs = [
        (-1.0, -95.0),
        (-95.0, -1.0),
        (-1e-6, -1e30),
        (-1e30, -1e-6),
        (-np.inf, -1.0),
        (-1.0, -20.5),
        (-1.0, -19.5),
    ]
    pairs += [(-1.0, -1.0), (-1.0, -1.1), (-1.1, -1.0), (-1.0, -1.3), (-1.3, -1.0), (-1.0, -2.5)]
    logp_bt, behavior_bt = jnp.array([pairs] * 3, jnp.float32).transpose(2, 0, 1)
    advantage_b, num_tokens = jnp.array([2.0, -2.0, 0.0]), jnp.float32(3 * len(pairs))
    everything = jnp.ones(logp_bt.shape, bool)

    def loss_of(logp_bt):
        return clipped_policy_loss(
            logp_bt, behavior_bt, advantage_b, everything, num_tokens, **CLIPS, dual_clip=dual_clip
        )

    (loss, metrics), gradient_bt = jax.value_and_grad(loss_of, has_aux=True)(logp_bt)
    wanted = [
        [slope(logp, behavior, float(a), dual_clip) / float(num_tokens) for logp, behavior in pairs]
        for a in advantage_b
    ]
    np.testing.assert_allclose(gradient_bt, wanted, rtol=1e-5)
    assert np.isfinite(loss) and np.isfinite([metrics.approx_kl, metrics.ratio_max, metrics.clip_fraction]).all()
    assert metrics.logp_gap_max == np.inf  # the gap is reported as it is


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38])
def test_what_stands_in_masked_places_reaches_neither_loss_nor_gradient(garbage):
    logp_bt, logp_behavior_bt, advantage_b, loss_mask_bt = random_batch()
    num_trained = jnp.float32(loss_mask_bt.sum())

    def both(logp_bt, behavior_bt):
        policy, metrics = clipped_policy_loss(logp_bt, behavior_bt, advantage_b, loss_mask_bt, num_trained, **CLIPS)
        return policy + sft_loss(logp_bt, loss_mask_bt, num_trained), metrics

    outcomes = [
        jax.value_and_grad(both, has_aux=True)(
            *(jnp.where(loss_mask_bt, part, fill) for part in (logp_bt, logp_behavior_bt))
        )
        for fill in (-1.0, garbage)
    ]
    for clean, dirty in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_array_equal(dirty, clean)
    assert np.isfinite(jax.tree.leaves(outcomes[1])[-1]).all()


def test_loss_and_gradient_are_zero_when_nothing_is_trained():
    logp_bt, logp_behavior_bt, advantage_b, loss_mask_bt = random_batch()
    nothing = jnp.zeros_like(loss_mask_bt)
    (loss, metrics), gradient_bt = jax.value_and_grad(
        lambda logp: clipped_policy_loss(logp, logp_behavior_bt, advantage_b, nothing, jnp.float32(0), **CLIPS),
        has_aux=True,
    )(logp_bt)
    assert loss == 0.0
    assert not np.asarray(gradient_bt).any()
    assert all(value == 0.0 for value in metrics)


def test_micro_batches_of_1_and_999_tokens_add_up_to_the_global_mean():
    generator = np.random.default_rng(3)
    logp_bt = jnp.asarray(generator.normal(-1, 1, (2, 999)), jnp.float32)
    behavior_bt = jnp.asarray(generator.normal(-1, 1, (2, 999)), jnp.float32)
    advantage_b = jnp.array([5.0, -1.0])
    mask_bt = jnp.asarray(np.arange(999)[None, :] < np.array([[1], [999]]))
    whole, metrics = clipped_policy_loss(logp_bt, behavior_bt, advantage_b, mask_bt, jnp.float32(1000), **CLIPS)
    parts = [
        clipped_policy_loss(
            logp_bt[row : row + 1],
            behavior_bt[row : row + 1],
            advantage_b[row : row + 1],
            mask_bt[row : row + 1],
            jnp.float32(1000),
            **CLIPS,
        )
        for row in (0, 1)
    ]
    assert parts[0][0] + parts[1][0] == pytest.approx(float(whole), rel=1e-5)
    merged = merge_metrics(parts[0][1], parts[1][1])
    for name in PolicyMetrics._fields:
        assert getattr(merged, name) == pytest.approx(float(getattr(metrics, name)), rel=1e-5), name


def test_advantages_are_not_differentiated_through():
    logp_bt, logp_behavior_bt, advantage_b, loss_mask_bt = random_batch()
    gradient_b = jax.grad(
        lambda advantage: clipped_policy_loss(
            logp_bt, logp_behavior_bt, advantage, loss_mask_bt, jnp.float32(9), **CLIPS
        )[0]
    )(advantage_b)
    assert not np.asarray(gradient_b).any()


def test_supervised_loss_is_the_mean_surprise_of_the_masked_tokens():
    loss = sft_loss(jnp.array([[-1.0, -2.0], [-4.0, -50.0]]), jnp.array([[True, True], [True, False]]), jnp.float32(3))
    assert loss == pytest.approx(7 / 3)
