"""Cache rows in host memory: an episode that waits for its environment gives its row to another episode.

The functions know nothing of a cache's contents: a cache is a tree of arrays with the logical axes of each
(`tbx_jax.shapes`), of which `b` counts rows and `s` positions. The invariant: a row that is swapped in is bit for bit
the row that was swapped out.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

C = TypeVar("C")  # a tree of arrays: a cache, or one row of it


def swap_out(cache: C, axes: PyTree[str], slot: int, length: int) -> C:
    """A row of the cache as host arrays, without the axis `b`, and with the first `length` positions only.

    Args:
        cache: tree of arrays.
        axes: axis string of each array, in the same structure.
        slot: index of the row.
        length: number of valid positions.
    """
    row = jax.device_get(_row(cache, np.int32(slot), axes=_AxesOfLeaves.of(axes)))
    return jax.tree.map(lambda leaf, names: _first(leaf, names, length), row, axes)


def swap_in(cache: C, axes: PyTree[str], slot: int, row: C, *, placement: C | None = None) -> C:
    """The cache with a row from `swap_out` in any slot. Takes ownership of `cache`: its buffers are donated.

    Args:
        cache: tree of arrays.
        axes: axis string of each array, in the same structure.
        slot: index of the row to replace.
        row: row from `swap_out`; zeros fill up its positions.
        placement: shardings of the returned cache; None leaves them to the compiler.
    """
    whole = jax.tree.map(_widened, row, cache, axes)
    return _with_row(cache, whole, np.int32(slot), axes=_AxesOfLeaves.of(axes), placement=placement)


class _AxesOfLeaves(tuple[str, ...]):
    """Axis strings of a tree in the order of its leaves: hashable, so a static argument of compiled functions."""

    @classmethod
    def of(cls, axes: PyTree[str]) -> _AxesOfLeaves:
        return cls(jax.tree.leaves(axes))


def _without_rows(axes: str) -> list[str]:
    return [name for name in axes.split() if name != "b"]


def _first(leaf: np.ndarray, axes: str, length: int) -> np.ndarray:
    """A copy of the row's valid part: a view would keep the whole row alive."""
    names = _without_rows(axes)
    cut = leaf[(slice(None),) * names.index("s") + (slice(length),)] if "s" in names else leaf
    return np.array(cut)


def _widened(leaf: np.ndarray, whole: jax.Array, axes: str) -> np.ndarray:
    """The row padded to the cache's number of positions."""
    names = _without_rows(axes)
    if "s" not in names:
        return leaf
    missing = whole.shape[axes.split().index("s")] - leaf.shape[names.index("s")]
    return np.pad(leaf, [(0, missing if name == "s" else 0) for name in names])


@functools.partial(jax.jit, static_argnames="axes")
def _row(cache: C, slot: jax.Array, *, axes: _AxesOfLeaves) -> C:
    leaves, structure = jax.tree.flatten(cache)
    rows = [
        jax.lax.dynamic_index_in_dim(leaf, slot, names.split().index("b"), keepdims=False)
        for leaf, names in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, rows)


@functools.partial(jax.jit, static_argnames=("axes", "placement"), donate_argnames="cache")
def _with_row(cache: C, row: C, slot: jax.Array, *, axes: _AxesOfLeaves, placement: C | None) -> C:
    leaves, structure = jax.tree.flatten(cache)
    updated = [
        jax.lax.dynamic_update_index_in_dim(leaf, new, slot, names.split().index("b"))
        for leaf, new, names in zip(leaves, jax.tree.leaves(row), axes, strict=True)
    ]
    cache = jax.tree.unflatten(structure, updated)
    return cache if placement is None else jax.lax.with_sharding_constraint(cache, placement)
