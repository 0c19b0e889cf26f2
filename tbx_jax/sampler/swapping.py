"""Rows of a cache kept in host memory: an episode that waits for its environment gives up its slot.

Nothing here knows what a cache is made of: a tree of arrays, and beside each its axis letters (`tbx_jax.shapes`), of
which `b` counts slots and `s` positions. What comes back is what went away, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np


def take_row(cache: Any, letters: Any, slot: int, length: int) -> Any:
    """A slot's row as arrays of the host, without the axis `b`, and with the first `length` positions only.

    Args:
        cache: a tree of arrays.
        letters: the same structure, with the axis string of each array.
        slot: which row.
        length: positions that hold something.
    """
    row = jax.device_get(_row(cache, np.int32(slot), letters=_Letters.of(letters)))
    return jax.tree.map(lambda leaf, axes: _first(leaf, axes, length), row, letters)


def put_row(cache: Any, letters: Any, slot: int, row: Any, *, placement: Any = None) -> Any:
    """The cache with a row that `take_row` gave, in any slot; the cache given is consumed.

    Args:
        row: positions that it lacks are filled with zeros.
        placement: shardings of the cache that is returned; None leaves them to the compiler.
    """
    whole = jax.tree.map(_widened, row, cache, letters)
    return _with_row(cache, whole, np.int32(slot), letters=_Letters.of(letters), placement=placement)


class _Letters(tuple):
    """Axis strings of a tree in the order of its leaves: an argument that compiled functions can be told apart by."""

    @classmethod
    def of(cls, letters: Any) -> _Letters:
        return cls(jax.tree.leaves(letters))


def _axis(axes: str, letter: str) -> int | None:
    parts = axes.split()
    return parts.index(letter) if letter in parts else None


def _without_slots(axes: str) -> str:
    return " ".join(letter for letter in axes.split() if letter != "b")


def _first(leaf: np.ndarray, axes: str, length: int) -> np.ndarray:
    """A copy of the row's valid part: what it was cut from must not stay alive with it."""
    place = _axis(_without_slots(axes), "s")
    cut = leaf if place is None else leaf[(slice(None),) * place + (slice(length),)]
    return np.array(cut)


def _widened(leaf: np.ndarray, whole: jax.Array, axes: str) -> np.ndarray:
    """The row with as many positions as the cache has."""
    place = _axis(_without_slots(axes), "s")
    if place is None:
        return leaf
    missing = whole.shape[_axis(axes, "s")] - leaf.shape[place]
    return np.pad(leaf, [(0, missing if axis == place else 0) for axis in range(leaf.ndim)])


@functools.partial(jax.jit, static_argnames="letters")
def _row(cache: Any, slot: jax.Array, *, letters: _Letters) -> Any:
    leaves, structure = jax.tree.flatten(cache)
    rows = [
        jax.lax.dynamic_index_in_dim(leaf, slot, _axis(axes, "b"), keepdims=False)
        for leaf, axes in zip(leaves, letters, strict=True)
    ]
    return structure.unflatten(rows)


@functools.partial(jax.jit, static_argnames=("letters", "placement"), donate_argnames="cache")
def _with_row(cache: Any, row: Any, slot: jax.Array, *, letters: _Letters, placement: Any) -> Any:
    leaves, structure = jax.tree.flatten(cache)
    news = [
        jax.lax.dynamic_update_index_in_dim(leaf, new, slot, _axis(axes, "b"))
        for leaf, new, axes in zip(leaves, jax.tree.leaves(row), letters, strict=True)
    ]
    cache = structure.unflatten(news)
    return cache if placement is None else jax.lax.with_sharding_constraint(cache, placement)
