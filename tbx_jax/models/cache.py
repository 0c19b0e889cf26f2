"""The cache: keys and values of each episode's tokens.

Each row of the cache belongs to one episode and has its own length. Positions at or after a row's length are
undefined, are never attended to, and are overwritten later. So `append` writes a whole chunk for every row and counts
only the valid part; no row needs a mask.

A hybrid model has layers with a state of fixed size instead (`DeltaState`). A state cannot forget its last tokens, so
only valid tokens update it; a row of length 0 starts from zeros whatever its state holds.

Keys are stored width-first (`h` before `s`) and values position-first, since both then stream through memory in the
order in which attention reduces them; on CPUs this halves the time of a decode step's attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from tbx_envs.errors import ShapeError
from tbx_jax.config import ModelConfig
from tbx_jax.shapes import HostOrDevice

# In `recent_bm`: the position lies before the start of the episode.
NO_TOKEN = -1


class DeltaState(NamedTuple):
    """The state of a hybrid model's delta layers.

    Attributes:
        inputs_lebmc: last inputs of the convolution, oldest first, zeros before the start.
        memory_lebuxy: memory of each head, in float32 for every compute type.
    """

    inputs_lebmc: Float[Array, "*le b m c"]
    memory_lebuxy: Float[Array, "*le b u x y"]


class Cache(NamedTuple):
    """Keys and values of computed tokens, row by row.

    Attributes:
        keys_lbkhs: keys after norm and rotary embedding.
        values_lbksh: values as projected.
        length_b: tokens in each row.
        recent_bm: ids of the last tokens of each row, oldest first; `NO_TOKEN` before the start (token shift).
        states: states of a hybrid's delta layers; None for dense models.
    """

    keys_lbkhs: Float[Array, "l b k h s"]
    values_lbksh: Float[Array, "l b k s h"]
    length_b: Int[HostOrDevice, "b"]
    recent_bm: Int[HostOrDevice, "b m"]
    states: DeltaState | None = None

    @property
    def num_slots(self) -> int:
        return self.length_b.shape[0]

    @property
    def capacity(self) -> int:
        return self.values_lbksh.shape[3]

    @property
    def position_bytes(self) -> int:
        """Size of one token's keys and values in all layers."""
        return (self.keys_lbkhs.nbytes + self.values_lbksh.nbytes) // (self.num_slots * self.capacity)

    def rows(self, slot_b: Int[Array, "b"] | None) -> tuple[Int[Array, "b"], Int[Array, "b m"]]:
        """`length_b` and `recent_bm` of some rows (None: of all)."""
        length_b, recent_bm = jnp.asarray(self.length_b), jnp.asarray(self.recent_bm)
        return (length_b, recent_bm) if slot_b is None else (length_b[slot_b], recent_bm[slot_b])


def cache_axes(config: ModelConfig) -> PyTree[str]:
    """The logical axes of each array of this model's cache, in the structure of the cache."""
    states = DeltaState._make(("l e b m c", "l e b u x y")) if config.hybrid else None
    return Cache._make(("l b k h s", "l b k s h", "b", "b m", states))


def empty_cache(config: ModelConfig, slots: int, capacity: int, dtype: str | None = None) -> Cache:
    """A cache of `slots` empty rows with room for `capacity` tokens each.

    An appended chunk must fit as a whole, its invalid part included: leave room for the longest chunk.

    Args:
        dtype: type of keys and values; None is the compute type.
    """
    shape = (config.attention_layers, slots, config.num_kv_heads)
    stored = jnp.dtype(dtype or config.dtype)
    return Cache(
        keys_lbkhs=jnp.zeros((*shape, config.head_width, capacity), stored),
        values_lbksh=jnp.zeros((*shape, capacity, config.head_width), stored),
        length_b=jnp.zeros((slots,), jnp.int32),
        recent_bm=jnp.full((slots, config.token_shift), NO_TOKEN, jnp.int32),
        states=empty_states(config, slots),
    )


def empty_states(config: ModelConfig, rows: int) -> DeltaState | None:
    """Initial states of the delta layers for `rows` episodes; None for a dense model."""
    if (hybrid := config.hybrid) is None:
        return None
    shape = (config.attention_layers, hybrid.delta_layers, rows)
    return DeltaState(
        jnp.zeros((*shape, hybrid.conv_taps - 1, hybrid.channels), jnp.dtype(config.dtype)),
        jnp.zeros((*shape, hybrid.value_heads, hybrid.key_width, hybrid.value_width), jnp.float32),
    )


def states_of(cache: Cache, slot_b: Int[Array, "b"] | None = None) -> DeltaState | None:
    """The states of some rows (None: of all), zeros for empty rows."""
    if cache.states is None:
        return None
    length_b, _ = cache.rows(slot_b)

    def rows(state: Array) -> Array:
        state = state if slot_b is None else state[:, :, slot_b]
        return jnp.where((length_b > 0).reshape(1, 1, -1, *(1,) * (state.ndim - 3)), state, 0)

    return jax.tree.map(rows, cache.states)


_Arrays = tuple[Array, Array, DeltaState | None]  # keys, values and states of a cache


def append(
    cache: Cache,
    keys_lbjkh: Float[Array, "l b j k h"],
    values_lbjkh: Float[Array, "l b j k h"],
    tokens_bj: Int[Array, "b j"],
    num_new_b: Int[Array, "b"],
    slot_b: Int[Array, "b"] | None = None,
    states: DeltaState | None = None,
) -> Cache:
    """The cache with the first `num_new_b` tokens of each chunk appended to its row.

    With the cache donated to the enclosing `jax.jit` the arrays are updated in place. Rows are written one after the
    other: as a loop of slice updates this is a hundred times faster on CPUs than the scatter that `vmap` makes of it.

    Args:
        keys_lbjkh, values_lbjkh, tokens_bj: chunks, valid tokens on the left.
        num_new_b: number of valid tokens in each chunk.
        slot_b: the row of the cache that each chunk is appended to, all different; None is every row in order.
        states: states of a hybrid model's delta layers after the valid tokens.

    Raises:
        ShapeError: a chunk longer than the capacity, or a hybrid's cache without new states.
    """
    b, chunk = tokens_bj.shape
    if (states is None) != (cache.states is None):
        raise ShapeError(
            "a hybrid model's cache takes keys, values and states, a dense model's no states; give both of one model"
        )
    if chunk > cache.capacity:
        raise ShapeError(f"a chunk of {chunk} tokens for a cache with room for {cache.capacity}; make the cache longer")
    slot_b = jnp.arange(b) if slot_b is None else slot_b
    new_keys_lbkhj = keys_lbjkh.transpose(0, 1, 3, 4, 2).astype(cache.keys_lbkhs.dtype)
    new_values_lbkjh = values_lbjkh.transpose(0, 1, 3, 2, 4).astype(cache.values_lbksh.dtype)
    length_b, recent_bm = cache.rows(slot_b)

    def write_row(row: Int[Array, ""], arrays: _Arrays) -> _Arrays:
        keys_lbkhs, values_lbksh, all_states = arrays
        slot, length = slot_b[row], length_b[row]
        new_keys = jax.lax.dynamic_slice_in_dim(new_keys_lbkhj, row, 1, axis=1)
        new_values = jax.lax.dynamic_slice_in_dim(new_values_lbkjh, row, 1, axis=1)
        return (
            jax.lax.dynamic_update_slice(keys_lbkhs, new_keys, (0, slot, 0, 0, length)),
            jax.lax.dynamic_update_slice(values_lbksh, new_values, (0, slot, 0, length, 0)),
            jax.tree.map(lambda whole, new: _move_state(whole, slot, new, row, num_new_b[row]), all_states, states),
        )

    keys_lbkhs, values_lbksh, all_states = jax.lax.fori_loop(
        0, b, write_row, (cache.keys_lbkhs, cache.values_lbksh, cache.states)
    )
    return Cache(
        keys_lbkhs=keys_lbkhs,
        values_lbksh=values_lbksh,
        length_b=jnp.asarray(cache.length_b).at[slot_b].set(length_b + num_new_b),
        recent_bm=jnp.asarray(cache.recent_bm).at[slot_b].set(last_tokens(recent_bm, tokens_bj, num_new_b)),
        states=all_states,
    )


def _move_state(
    whole: Array,
    slot: Int[Array, ""],
    new: Array,
    row: Int[Array, ""],
    num_new: Int[Array, ""],
) -> Array:
    """`whole` with row `slot` (axis 2) replaced by row `row` of `new`, if that row has any new token."""
    before = jax.lax.dynamic_slice_in_dim(whole, slot, 1, axis=2)
    after = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=2).astype(whole.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, jnp.where(num_new > 0, after, before), slot, axis=2)


def last_tokens(
    recent_bm: Int[Array, "b m"], tokens_bj: Int[Array, "b j"], num_new_b: Int[Array, "b"]
) -> Int[Array, "b m"]:
    """The last `m` ids of each row after the first `num_new_b` of `tokens_bj` are appended."""
    known = jnp.concatenate([recent_bm, tokens_bj], axis=1)
    places = num_new_b[:, None] + jnp.arange(recent_bm.shape[1])[None, :]
    return jnp.take_along_axis(known, places, axis=1)
