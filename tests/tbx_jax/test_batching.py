"""Batching: nothing is lost, nothing is added."""

import itertools

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbx_envs.errors import ShapeError
from tbx_jax.batching import build_batch, length_buckets
from tbx_jax.trajectory import Trajectory


def trajectory(length, seed=0, uid="t"):
    generator = np.random.default_rng([seed, length])
    loss_mask_t = generator.random(length) < 0.4
    return Trajectory(
        uid=uid,
        attempt=seed,
        reward=1.0,
        truncated=False,
        tokens_t=generator.integers(1, 50, length).astype(np.int32),
        loss_mask_t=loss_mask_t,
        logp_behavior_t=np.where(loss_mask_t, -generator.random(length), 0).astype(np.float32),
    )


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), rows=st.integers(1, 9))
def test_every_trajectory_is_in_a_batch_exactly_once_with_its_own_advantage(lengths, rows):
    trajectories = [trajectory(length, seed) for seed, length in enumerate(lengths)]
    advantages = np.arange(1, len(lengths) + 1, dtype=np.float32)
    batch = build_batch(trajectories, advantages, micro_batch=rows, buckets=length_buckets(300))

    found = {}
    for micro in batch.micro_batches:
        assert micro.tokens_bt.shape[0] == rows and micro.tokens_bt.shape[1] in length_buckets(300)
        for row in range(rows):
            advantage = float(micro.advantage_b[row])
            if advantage == 0.0:
                assert not micro.loss_mask_bt[row].any() and not micro.tokens_bt[row].any()
                continue
            assert advantage not in found
            found[advantage] = True
            one = trajectories[int(advantage) - 1]
            padding = slice(len(one), None)
            np.testing.assert_array_equal(micro.tokens_bt[row, : len(one)], one.tokens_t)
            np.testing.assert_array_equal(micro.loss_mask_bt[row, : len(one)], one.loss_mask_t)
            np.testing.assert_array_equal(micro.logp_behavior_bt[row, : len(one)], one.logp_behavior_t)
            assert not micro.loss_mask_bt[row, padding].any()
    assert len(found) == len(trajectories)
    assert batch.num_trained == sum(int(one.loss_mask_t.sum()) for one in trajectories)
    assert batch.num_tokens == sum(lengths)


def test_sequences_of_similar_length_share_a_micro_batch():
    batch = build_batch(
        [trajectory(length) for length in (20, 300, 25, 290)],
        np.array([1, 2, 3, 4], np.float32),
        micro_batch=2,
        buckets=(32, 320),
    )
    assert [micro.tokens_bt.shape for micro in batch.micro_batches] == [(2, 320), (2, 32)]
    assert [micro.advantage_b.tolist() for micro in batch.micro_batches] == [[2, 4], [3, 1]]


def test_buckets_grow_by_a_half_at_most_and_end_with_the_longest():
    buckets = length_buckets(5000)
    assert buckets[-1] == 5000
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(buckets))


def test_a_trajectory_longer_than_the_last_bucket_is_an_error():
    with pytest.raises(ShapeError, match="300 tokens"):
        build_batch([trajectory(300)], np.ones(1, np.float32), micro_batch=1, buckets=(256,))


def test_a_trajectory_whose_parts_differ_in_length_is_an_error(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests
    with pytest.raises(ShapeError, match="3 tokens"):
        Trajectory("t", 0, 1.0, False, np.zeros(3, np.int32), np.zeros(3, bool), np.zeros(2, np.float32))
