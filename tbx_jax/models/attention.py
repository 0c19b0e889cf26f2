"""Rotary positions and softmax attention, for all decoders.

Attention has two parts: cached tokens, and fresh tokens that are not committed to the cache yet. A forward pass without
a cache has only the fresh part, prefill has both, and the decode steps of a dispatch share one small buffer of fresh
tokens, so the large cache is only read between two commits.

The cached part is read in one of two ways. `Cached` is copied out of the cache before the first step: the fastest where
it is small enough to stay in the processor's cache over all steps, and the only one whose lengths are static. `InPlace`
is the cache itself, read block by block as far as the longest row goes: nothing large is copied, and one program serves
all lengths.

A pass without a cache goes through `jax.nn.dot_product_attention` with cuDNN where that applies (a GPU, bfloat16).
Elsewhere the code below is used: on two cores a forward and backward pass takes 0.6 to 0.7 of the time that the
library's XLA version takes, at the sizes of nano and of SmolLM2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tbx_jax.config import RopeScaling
from tbx_jax.models.cache import DeltaState

_MASKED = -1e30  # finite, so that a difference of two masked scores is not NaN
_BLOCK = 128  # positions that are read together in place; of 64 to 512 the fastest on CPUs, for small and large models
_CUDNN_WIDEST_HEAD = 128  # 256 from compute capability 9.0 on


class Fresh(NamedTuple):
    """Computed keys, values and states that are not committed to the cache yet.

    Attributes:
        keys_lbjkh, values_lbjkh: keys and values of each fresh token.
        states: states of a hybrid's delta layers after the valid fresh tokens; None for dense models.
    """

    keys_lbjkh: Float[Array, "*l b j k h"]
    values_lbjkh: Float[Array, "*l b j k h"]
    states: DeltaState | None = None


class Cached(NamedTuple):
    """A copy of the part of the cache that attention reads."""

    keys_lbkhs: Float[Array, "*l b k h s"]
    values_lbksh: Float[Array, "*l b k s h"]


class InPlace(NamedTuple):
    """The cache itself, which attention reads in place.

    Attributes:
        keys_lbkhs, values_lbksh: keys and values of the whole cache: more rows and positions than are read.
        slot_b: cache row that each row of queries reads; None is every row in order.
        length_b: number of cached tokens that each row of queries reads.
        layer: index of the layer to read; None until the decoder sets it.
    """

    keys_lbkhs: Float[Array, "l c k h s"]
    values_lbksh: Float[Array, "l c k s h"]
    slot_b: Int[Array, "b"] | None
    length_b: Int[Array, "b"]
    layer: Int[Array, ""] | int | None = None

    @property
    def block(self) -> int:
        """Positions that are read together."""
        return min(_BLOCK, self.values_lbksh.shape[3])

    @property
    def num_blocks(self) -> Int[Array, ""]:
        """Number of blocks up to the end of the longest row."""
        return -(-jnp.max(self.length_b) // self.block)

    def read(
        self, number: Int[Array, ""]
    ) -> tuple[Float[Array, "b k h s"], Float[Array, "b k s h"], Bool[Array, "b s"]]:
        """Keys and values of a block, and the positions with tokens that no earlier block had."""
        first = number * self.block
        start = jnp.minimum(first, self.values_lbksh.shape[3] - self.block)  # the last block ends with the cache
        place_s = start + jnp.arange(self.block)
        holds_bs = (place_s >= first)[None, :] & (place_s[None, :] < self.length_b[:, None])
        return self._slices(self.keys_lbkhs, start, 4), self._slices(self.values_lbksh, start, 3), holds_bs

    def _slices(self, array: Array, start: Int[Array, ""], axis: int) -> Array:
        """`block` positions along `axis` of the layer, for each row of queries."""
        assert self.layer is not None  # set by the decoder
        sizes = [1, *array.shape[1:]]
        sizes[axis] = self.block
        starts: list[Array | int] = [self.layer, 0, 0, 0, 0]
        starts[axis] = start
        if self.slot_b is None:
            return jax.lax.dynamic_slice(array, starts, sizes)[0]
        sizes[1] = 1

        def row(slot: Int[Array, ""]) -> Array:
            return jax.lax.dynamic_slice(array, [starts[0], slot, *starts[2:]], sizes)[0, 0]

        return jax.vmap(row)(self.slot_b)


def rotary_angles(
    position_bt: Int[Array, "b t"], rotary_width: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "b t h2"], Float[Array, "b t h2"]]:
    """Cosine and sine of the rotation at each position, one angle per pair of components."""
    frequency = theta ** (-jnp.arange(0, rotary_width, 2, dtype=jnp.float32) / rotary_width)
    if scaling is not None:
        frequency = scaled_frequencies(frequency, scaling)
    angle = position_bt[..., None].astype(jnp.float32) * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def scaled_frequencies(frequency: Float[Array, " h2"], scaling: RopeScaling) -> Float[Array, " h2"]:
    """Frequencies as in Llama 3.1: long waves divided by `factor`, short ones unchanged, a ramp in between.

    A wave is long when fewer than `low_freq_factor` periods fit into the model's original training length, short when
    more than `high_freq_factor` do.
    """
    waves = scaling.original_length * frequency / (2 * math.pi)
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


def rotate(
    x_btnh: Float[Array, "b t n h"], cos: Float[Array, "#b t h2"], sin: Float[Array, "#b t h2"]
) -> Float[Array, "b t n h"]:
    """Rotary embedding of the first 2 * h2 components, in float32; component i is paired with i + h2.

    Published Hugging Face weights use the same pairing.
    """
    half = cos.shape[-1]
    wide = x_btnh[..., : 2 * half].astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_btnh.dtype)
    if rotated.shape == x_btnh.shape:
        return rotated
    return jnp.concatenate([rotated, x_btnh[..., 2 * half :]], axis=-1)


def attention(
    query_btnh: Float[Array, "b t n h"],
    fresh: Fresh,
    attends_btj: Bool[Array, "#b t j"] | None,
    cached: Cached | InPlace | None,
    attends_bs: Bool[Array, "b s"] | None,
) -> Float[Array, "b t n h"]:
    """Softmax attention over cached and fresh tokens together; softmax is in float32.

    Query head i reads key-value head i // r, as in all supported models.

    Args:
        attends_btj: True where token t attends to fresh token j; None is causal, with j <= t.
        attends_bs: True where a row of `Cached` holds a token; None without `Cached`.
    """
    keys_bjkh, values_bjkh = fresh.keys_lbjkh, fresh.values_lbjkh
    if cached is None and keys_bjkh.shape[1] == query_btnh.shape[1] and cudnn_applies(query_btnh, attends_btj):
        return jax.nn.dot_product_attention(
            query_btnh,
            keys_bjkh,
            values_bjkh,
            mask=None if attends_btj is None else attends_btj[:, None],
            is_causal=attends_btj is None,
            implementation="cudnn",
        )
    if attends_btj is None:
        place_t = jnp.arange(query_btnh.shape[1])
        attends_btj = place_t[None, :, None] >= place_t[None, None, :]
    return _two_part_attention(query_btnh, fresh, attends_btj, cached, attends_bs)


def cudnn_applies(query_btnh: Float[Array, "b t n h"], attends_btj: Bool[Array, "#b t j"] | None) -> bool:
    """True when cuDNN's fused attention supports these arrays: its conditions in jax 0.10."""
    if jax.default_backend() != "gpu" or query_btnh.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    capability = float(getattr(jax.local_devices()[0], "compute_capability", "0"))
    widest = _CUDNN_WIDEST_HEAD * (2 if capability >= 9.0 else 1)
    t, h = query_btnh.shape[1], query_btnh.shape[3]
    return capability >= 8.0 and h % 8 == 0 and h <= widest and (attends_btj is None or t % 2 == 0)


def _two_part_attention(
    query_btnh: Float[Array, "b t n h"],
    fresh: Fresh,
    attends_btj: Bool[Array, "#b t j"],
    cached: Cached | InPlace | None,
    attends_bs: Bool[Array, "b s"] | None,
) -> Float[Array, "b t n h"]:
    """Both parts share one maximum and one denominator, so their arrays need not be concatenated.

    All queries of a key-value head form one axis q: two free axes in one product make CPU code several times slower.
    """
    b, t, n, h = query_btnh.shape
    k = fresh.keys_lbjkh.shape[-2]
    r = n // k
    query_bkqh = (query_btnh * h**-0.5).transpose(0, 2, 1, 3).reshape(b, k, r * t, h)
    score_bkqj = jnp.einsum("bkqh,bjkh->bkqj", query_bkqh, fresh.keys_lbjkh, preferred_element_type=jnp.float32)
    score_bkqj = jnp.where(jnp.tile(attends_btj, (1, r, 1))[:, None], score_bkqj, _MASKED)
    highest_bkq1 = jax.lax.stop_gradient(jnp.max(score_bkqj, axis=-1, keepdims=True))
    if isinstance(cached, Cached):
        assert attends_bs is not None  # `readable` returns both or neither
        keys_bkhs, values_bksh = (part.astype(query_btnh.dtype) for part in cached)  # a cache may be narrower
        score_bkqs = jnp.einsum("bkqh,bkhs->bkqs", query_bkqh, keys_bkhs, preferred_element_type=jnp.float32)
        score_bkqs = jnp.where(attends_bs[:, None, None], score_bkqs, _MASKED)
        highest_bkq1 = jnp.maximum(highest_bkq1, jnp.max(score_bkqs, axis=-1, keepdims=True))
    weight_bkqj = jnp.exp(score_bkqj - highest_bkq1)
    total_bkq = jnp.sum(weight_bkqj, axis=-1)
    mixed_bkqh = jnp.einsum("bkqj,bjkh->bkqh", weight_bkqj.astype(query_btnh.dtype), fresh.values_lbjkh)
    if isinstance(cached, Cached):
        weight_bkqs = jnp.exp(score_bkqs - highest_bkq1)
        total_bkq = total_bkq + jnp.sum(weight_bkqs, axis=-1)
        mixed_bkqh += jnp.einsum("bkqs,bksh->bkqh", weight_bkqs.astype(query_btnh.dtype), values_bksh)
    if isinstance(cached, InPlace):
        total_bkq, mixed_bkqh = _with_blocks(query_bkqh, cached, highest_bkq1, total_bkq, mixed_bkqh)
    mixed_bkqh = mixed_bkqh / total_bkq[..., None].astype(mixed_bkqh.dtype)
    return mixed_bkqh.reshape(b, n, t, h).transpose(0, 2, 1, 3)


def _with_blocks(
    query_bkqh: Float[Array, "b k q h"],
    cached: InPlace,
    highest_bkq1: Float[Array, "b k q 1"],
    total_bkq: Float[Array, "b k q"],
    mixed_bkqh: Float[Array, "b k q h"],
) -> tuple[Float[Array, "b k q"], Float[Array, "b k q h"]]:
    """Denominator and weighted sum of the fresh part with the cached part added, block by block.

    A block with a higher score scales down the sums so far (online softmax, https://arxiv.org/abs/1805.02867).
    """
    dtype = query_bkqh.dtype

    def add(number: Int[Array, ""], so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest_bkq1, total_bkq, mixed_bkqh = so_far
        keys_bkhs, values_bksh, holds_bs = cached.read(number)
        keys_bkhs, values_bksh = keys_bkhs.astype(dtype), values_bksh.astype(dtype)
        score_bkqs = jnp.einsum("bkqh,bkhs->bkqs", query_bkqh, keys_bkhs, preferred_element_type=jnp.float32)
        score_bkqs = jnp.where(holds_bs[:, None, None], score_bkqs, _MASKED)
        higher_bkq1 = jnp.maximum(highest_bkq1, jnp.max(score_bkqs, axis=-1, keepdims=True))
        weight_bkqs, shrink_bkq1 = jnp.exp(score_bkqs - higher_bkq1), jnp.exp(highest_bkq1 - higher_bkq1)
        more_bkqh = jnp.einsum(
            "bkqs,bksh->bkqh", weight_bkqs.astype(dtype), values_bksh, preferred_element_type=jnp.float32
        )
        total_bkq = total_bkq * shrink_bkq1[..., 0] + jnp.sum(weight_bkqs, axis=-1)
        return higher_bkq1, total_bkq, mixed_bkqh * shrink_bkq1 + more_bkqh

    start = (highest_bkq1, total_bkq, mixed_bkqh.astype(jnp.float32))
    _, total_bkq, mixed_bkqh = jax.lax.fori_loop(0, cached.num_blocks, add, start)
    return total_bkq, mixed_bkqh.astype(dtype)
