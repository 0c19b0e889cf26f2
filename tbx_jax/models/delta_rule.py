"""The gated delta rule: attention with a memory of fixed size. Two forms of one function, each the other's oracle.

A head keeps a matrix M (key width x value width). For each token, with decay a in (0, 1] and write strength w in
(0, 1):

    M <- a M                          forget
    M <- M + k (w (v - k'M))'         move the value recalled by the key towards v, by the share w
    out = q'M

`recurrent` does this token by token, for decoding. `chunked` computes the same with matrix products over chunks of
tokens, for prefill and training: within a chunk the written values solve a triangular system.

A token with write strength 0 and log decay 0 leaves the memory exactly as it is; padding is masked that way.
Everything is computed in float32.

Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Tokens whose interactions are computed at once; the memory is carried from chunk to chunk.
_CHUNK = 64
# Triangular blocks up to this size are inverted by their powers.
_BLOCK = 8
# The exponential of anything lower is zero in float32. `chunked` sums log decays over a chunk, and a sum of large ones
# has no digits left for the others.
_FORGETS_ALL = -104.0


def recurrent(
    query_btux: Float[Array, "b t u x"],
    key_btux: Float[Array, "b t u x"],
    value_btuy: Float[Array, "b t u y"],
    log_decay_btu: Float[Array, "b t u"],
    write_btu: Float[Array, "b t u"],
    memory_buxy: Float[Array, "b u x y"],
) -> tuple[Float[Array, "b t u y"], Float[Array, "b u x y"]]:
    """The read of each token, and the memory after the last; one token after the other."""

    def token(memory_buxy: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        query_bux, key_bux, value_buy, log_decay_bu, write_bu = inputs
        memory_buxy = memory_buxy * jnp.exp(log_decay_bu)[..., None, None]
        recalled_buy = jnp.einsum("bux,buxy->buy", key_bux, memory_buxy)
        written_buy = write_bu[..., None] * (value_buy - recalled_buy)
        memory_buxy = memory_buxy + key_bux[..., None] * written_buy[:, :, None, :]
        return memory_buxy, jnp.einsum("bux,buxy->buy", query_bux, memory_buxy)

    inputs = (query_btux, key_btux, value_btuy, log_decay_btu, write_btu)
    if query_btux.shape[1] == 1:
        memory_buxy, read_buy = token(memory_buxy, tuple(part[:, 0] for part in inputs))
        return read_buy[:, None], memory_buxy
    memory_buxy, read_tbuy = jax.lax.scan(token, memory_buxy, tuple(part.swapaxes(0, 1) for part in inputs))
    return read_tbuy.swapaxes(0, 1), memory_buxy


def chunked(
    query_btux: Float[Array, "b t u x"],
    key_btux: Float[Array, "b t u x"],
    value_btuy: Float[Array, "b t u y"],
    log_decay_btu: Float[Array, "b t u"],
    write_btu: Float[Array, "b t u"],
    memory_buxy: Float[Array, "b u x y"],
    segments_bt: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t u y"], Float[Array, "b u x y"]]:
    """The same through matrix products.

    Args:
        segments_bt: segment ids of packed sequences; a token reads only what its own segment wrote. `memory_buxy`
            belongs to the first token's segment, the returned memory to the last token's.
    """
    b, t, u, _ = query_btux.shape
    size = min(_CHUNK, max(_BLOCK, 1 << (t - 1).bit_length()))
    pad = -t % size

    def in_chunks(part: Array, mode: str = "constant") -> Array:
        """(b, t, u, ...) -> (a, b, u, i, ...): chunks first, the last one padded."""
        part = jnp.pad(part, ((0, 0), (0, pad)) + ((0, 0),) * (part.ndim - 2), mode=mode)
        return jnp.moveaxis(part.reshape(b, -1, size, *part.shape[2:]), (1, 3), (0, 2))

    query, key, value, log_decay, write = map(in_chunks, (query_btux, key_btux, value_btuy, log_decay_btu, write_btu))
    segments = jnp.zeros((b, t), jnp.int32) if segments_bt is None else segments_bt
    segments_ab1i = in_chunks(segments[..., None], mode="edge")
    before_ab11 = jnp.concatenate([segments_ab1i[:1, ..., :1], segments_ab1i[:-1, ..., -1:]])
    continues_ab1i = segments_ab1i == before_ab11
    lasting_ab1i = segments_ab1i == segments_ab1i[..., -1:]

    since_start_abui = jnp.cumsum(jnp.maximum(log_decay, _FORGETS_ALL), axis=-1)
    place_i = jnp.arange(size)
    sees_ab1ij = (place_i[:, None] >= place_i[None, :]) & (segments_ab1i[..., :, None] == segments_ab1i[..., None, :])
    between = jnp.where(sees_ab1ij, since_start_abui[..., :, None] - since_start_abui[..., None, :], -jnp.inf)
    decay_abuij = jnp.exp(between)
    decay_abui = jnp.exp(since_start_abui) * continues_ab1i

    overlap_abuij = jnp.einsum("abuix,abujx->abuij", key, key) * decay_abuij * write[..., None]
    wanted = jnp.concatenate([value, key * decay_abui[..., None]], axis=-1) * write[..., None]
    solved = unit_triangular_inverse(overlap_abuij) @ wanted
    written_abuiy, recalls_abuix = jnp.split(solved, [value.shape[-1]], axis=-1)
    scores_abuij = jnp.einsum("abuix,abujx->abuij", query, key) * decay_abuij
    until_end_abui = jnp.exp(since_start_abui[..., -1:] - since_start_abui) * lasting_ab1i
    carried_abu = jnp.exp(since_start_abui[..., -1]) * continues_ab1i[..., -1]

    def chunk(memory_buxy: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        query_buix, scores_buij, written_buiy, recalls_buix, key_buix, carried_bu = inputs
        new_buiy = written_buiy - recalls_buix @ memory_buxy
        read_buiy = query_buix @ memory_buxy + scores_buij @ new_buiy
        memory_buxy = memory_buxy * carried_bu[..., None, None] + key_buix.swapaxes(-1, -2) @ new_buiy
        return memory_buxy, read_buiy

    memory_buxy, read_abuiy = jax.lax.scan(
        chunk,
        memory_buxy,
        (
            query * decay_abui[..., None],
            scores_abuij,
            written_abuiy,
            recalls_abuix,
            key * until_end_abui[..., None],
            carried_abu,
        ),
    )
    read_btuy = jnp.moveaxis(read_abuiy, (0, 2), (1, 3)).reshape(b, -1, u, value.shape[-1])[:, :t]
    return read_btuy, memory_buxy


def unit_triangular_inverse(lower: Float[Array, "*b i i"]) -> Float[Array, "*b i i"]:
    """The inverse of I plus the strictly lower part of `lower`, through matrix products only.

    Blocks on the diagonal first: their strictly lower part N is nilpotent, so the inverse of I + N is
    (I - N)(I + N^2)(I + N^4) for blocks of 8; larger ones would lose digits that way. Then pairs of neighbours:

        [A 0; B D]^-1 = [A^-1 0; -D^-1 B A^-1 D^-1]

    LAPACK's solver is not used: with several devices on one host's CPU it deadlocks in its thread pool.

    Args:
        lower: matrices whose size is a power of two, at least `_BLOCK`.
    """
    size, width = _BLOCK, lower.shape[-1]
    first = jnp.tril(_diagonal_blocks(lower, size), -1)
    square = first @ first
    eye = jnp.eye(size, dtype=lower.dtype).reshape((1,) * (lower.ndim - 1) + (size, size))
    inverse = (eye - first) @ (eye + square) @ (eye + square @ square)
    while size < width:
        upper_left, lower_right = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(lower, 2 * size)[..., size:, :size]
        lower_left = -(lower_right @ below @ upper_left)
        top = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([lower_left, lower_right], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(matrix: Float[Array, "*b i i"], size: int) -> Float[Array, "*b blocks size size"]:
    """The square blocks of this size on the diagonal."""
    width = matrix.shape[-1]
    starts = range(0, width, size)
    return jnp.stack([matrix[..., at : at + size, at : at + size] for at in starts], axis=-3)
