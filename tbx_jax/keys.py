"""JAX keys by name: everything random on the device is a function of (seed, names), never of call order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tbx_envs.seeding import derive

# Part of what a seed means: another generator would give other tokens for the same seed.
_IMPLEMENTATION = "threefry2x32"


def key_bits(seed: int, *names: str | int) -> np.ndarray:
    """The raw bits (two uint32) of `key_for(seed, *names)`, for callers with many keys on the host."""
    bits = derive(seed, *names)
    return np.array([bits >> 32, bits & 0xFFFFFFFF], dtype=np.uint32)


def as_keys(bits: jax.Array | np.ndarray) -> jax.Array:
    """Typed keys from raw bits, without the last axis (two uint32). Works inside `jax.jit`."""
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=_IMPLEMENTATION)


def key_for(seed: int, *names: str | int) -> jax.Array:
    """The key of a named part of a run, for example `key_for(seed, "rollout", step)`.

    Uses all 63 bits of the derived seed (`jax.random.key` would drop the upper half when 64-bit types are off).
    """
    return as_keys(key_bits(seed, *names))
