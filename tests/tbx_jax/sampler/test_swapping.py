"""Rows that go to the host and come back, in caches of both kinds of model."""

import jax
import numpy as np
import pytest
from small_model import CONFIG, HYBRID_SIZES

from tbx_jax.config import MeshConfig
from tbx_jax.mesh import build_mesh, shard_tree
from tbx_jax.models.cache import cache_axes, empty_cache
from tbx_jax.sampler.swapping import swap_in, swap_out

SLOTS, CAPACITY = 4, 24
CONFIGS = {"dense": CONFIG, "hybrid": CONFIG.model_copy(update=HYBRID_SIZES)}


def noisy_cache(config, dtype=None):
    """A cache full of numbers, and where each array counts slots and positions."""
    rng = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda leaf: rng.integers(-9, 9, leaf.shape).astype(leaf.dtype), empty_cache(config, SLOTS, CAPACITY, dtype)
    )
    axes = [(axes.split().index("b"), "s" in axes.split()) for axes in jax.tree.leaves(cache_axes(config))]
    return jax.device_put(cache), axes


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_row_comes_back_bit_for_bit_into_any_slot_and_others_stay(kind, dtype):
    config = CONFIGS[kind]
    logical = cache_axes(config)
    cache, axes = noisy_cache(config, dtype)
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    row = swap_out(cache, logical, 1, CAPACITY)
    after = [np.array(leaf) for leaf in jax.tree.leaves(swap_in(cache, logical, 3, row))]
    for old, new, (slots, _) in zip(before, after, axes, strict=True):
        old, new = np.moveaxis(old, slots, 0), np.moveaxis(new, slots, 0)
        assert new[3].tobytes() == old[1].tobytes()
        assert new[:3].tobytes() == old[:3].tobytes()


def test_only_positions_that_hold_something_are_kept_in_host_memory():
    logical = cache_axes(CONFIG)
    cache, _ = noisy_cache(CONFIG)
    whole = np.array(cache.values_lbksh)
    row = swap_out(cache, logical, 2, 5)
    assert row.keys_lbkhs.shape[-1] == row.values_lbksh.shape[-2] == 5
    assert row.values_lbksh.base is None
    restored = np.array(swap_in(cache, logical, 0, row).values_lbksh)
    np.testing.assert_array_equal(restored[:, 0, :, :5], whole[:, 2, :, :5])
    assert not restored[:, 0, :, 5:].any()


def test_a_row_of_a_cache_that_is_split_over_devices_comes_back_and_the_cache_stays_split():
    rules = {"b": "fsdp"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 2}, rules=rules))
    logical = cache_axes(CONFIG)
    cache, _ = noisy_cache(CONFIG)
    whole = np.array(cache.keys_lbkhs)
    cache = shard_tree(cache, logical, mesh, rules)
    placement = jax.tree.map(lambda leaf: leaf.sharding, cache)
    restored = swap_in(cache, logical, 3, swap_out(cache, logical, 0, CAPACITY), placement=placement)
    np.testing.assert_array_equal(np.array(restored.keys_lbkhs)[:, 3], whole[:, 0])
    assert restored.keys_lbkhs.sharding == placement.keys_lbkhs
