"""The interface of all models: parameters are plain pytrees, functions are pure.

`build` makes a `Model` (static and hashable, so an argument for `static_argnums`) and its parameters (nested
dictionaries of float32 arrays). Sampler and learner call the same functions, so their log-probabilities agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tbx_envs.errors import ShapeError
from tbx_jax.config import ModelConfig
from tbx_jax.models.attention import Cached, Fresh, InPlace
from tbx_jax.models.cache import NO_TOKEN, Cache, append, states_of
from tbx_jax.models.decoder import Decoder
from tbx_jax.models.hybrid import HybridDecoder, empty_buffer

Params = dict[str, Any]

# Logits that `token_logps` holds at once: 64 MB of float32. Longer inputs are computed in pieces.
_LOGITS_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True)
class Model:
    """The static part of a model: all but its parameters.

    Attributes:
        config: sizes and options.
        vocabulary: number of token ids.
        graphdef: structure of the Flax module, to be merged with parameters.
    """

    config: ModelConfig
    vocabulary: int
    graphdef: nnx.GraphDef = dataclasses.field(hash=False)  # slow to hash, and a function of the other two


def build(config: ModelConfig, vocabulary: int, key: jax.Array) -> tuple[Model, Params]:
    """A model with random parameters, drawn on the host: compiling a program for each shape would take long."""
    model, _ = abstract(config, vocabulary)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))

    def draw(parameter: nnx.Param) -> np.ndarray:
        noise = rng.standard_normal(parameter.shape, np.float32) if parameter.std else np.zeros(parameter.shape)
        return (parameter.start + parameter.std * noise).astype(parameter.dtype)

    return model, jax.device_put(_each_parameter(model, draw))


def abstract(config: ModelConfig, vocabulary: int) -> tuple[Model, Params]:
    """The model of this configuration, with `jax.ShapeDtypeStruct` in place of parameter arrays."""
    graphdef, state = nnx.split(_describe(config, vocabulary), nnx.Param)
    return Model(config, vocabulary, graphdef), nnx.to_pure_dict(state)


def _describe(config: ModelConfig, vocabulary: int) -> Decoder:
    """The decoder of this configuration, with shapes and initial distributions in place of arrays."""
    return HybridDecoder(config, vocabulary) if config.hybrid else Decoder(config, vocabulary)


def parameter_axes(model: Model) -> Params:
    """The logical axes of each parameter (`"l d n h"`), in the structure of the parameters."""
    return _each_parameter(model, lambda parameter: parameter.logical_axes)


def compute_params(model: Model, params: Params) -> Params:
    """The parameters in the compute type: enough for sampling, and half the memory in bfloat16. Same results.

    Every use of a matrix rounds it to the compute type anyway. Vectors of norms and decays are used in float32 and
    stay in it.
    """

    def in_type(leaf: Array, axes: str) -> Array:
        return leaf.astype(model.config.dtype) if _is_matrix(axes) and leaf.dtype != model.config.dtype else leaf

    return jax.tree.map(in_type, params, parameter_axes(model))


def _is_matrix(axes: str) -> bool:
    """True for parameters that are rounded to the compute type before each use."""
    return len(set(axes.split()) - {"l", "e"}) > 1


def _each_parameter(model: Model, function: Callable[[nnx.Param], Any]) -> Params:
    """`function` of each parameter's description, in the structure of the parameters."""
    state = nnx.state(_describe(model.config, model.vocabulary), nnx.Param)
    return nnx.to_pure_dict(jax.tree.map(function, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)))


def apply(
    model: Model,
    params: Params,
    tokens_bt: Int[Array, "b t"],
    *,
    cache: Cache | None = None,
    valid_bt: Bool[Array, "b t"] | None = None,
    segments_bt: Int[Array, "b t"] | None = None,
    attend_length: int | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "b t d"], Cache | None]:
    """Hidden states of `tokens_bt`.

    Without a cache: a causal pass over left-aligned sequences, positions from 0. Padding on the right needs no mask,
    since no earlier token attends to it. With a cache: each row's tokens follow those that the row already holds, and
    the returned cache holds them too.

    Args:
        cache: rows to continue; donate it to `jax.jit` and use only the returned one.
        valid_bt: with a cache only: True for the tokens to append, on the left of each row; None is all.
        segments_bt: without a cache only: segment ids of packed sequences. Tokens attend to their own segment,
            positions restart with it, and token shift does not cross into it. Segments follow one another, and each id
            occurs once.
        attend_length: with a cache only, static: number of cache positions to read, at least the longest row.
        remat: keep only the layers' inputs for the backward pass, and compute activations again.

    Returns:
        Hidden states after the final norm, and the new cache (None without one).

    Raises:
        ShapeError: arguments that exclude each other.
    """
    decoder = nnx.merge(model.graphdef, params)
    if cache is None:
        if valid_bt is not None or attend_length is not None:
            raise ShapeError("valid_bt and attend_length apply to a cache, and none was given; leave them out")
        return _full(decoder, model, tokens_bt, segments_bt, remat), None
    if segments_bt is not None:
        raise ShapeError("segments_bt packs several sequences in a row, and a row of a cache holds one; leave one out")
    if valid_bt is None:
        num_new_b = jnp.full(tokens_bt.shape[:1], tokens_bt.shape[1], jnp.int32)
    else:
        num_new_b = jnp.sum(valid_bt, axis=1, dtype=jnp.int32)
    hidden_btd, fresh = with_cache(model, params, tokens_bt, cache, attend_length, num_new_b=num_new_b)
    return hidden_btd, append_fresh(cache, fresh, tokens_bt, num_new_b)


def _full(
    decoder: Decoder,
    model: Model,
    tokens_bt: Int[Array, "b t"],
    segments_bt: Int[Array, "b t"] | None,
    remat: bool,
) -> Float[Array, "b t d"]:
    """The pass without a cache."""
    b, t = tokens_bt.shape
    place_t = jnp.arange(t)
    attends_btj = None
    position_bt = place_t[None, :]
    if segments_bt is not None:
        attends_btj = place_t[None, :, None] >= place_t[None, None, :]
        attends_btj = attends_btj & (segments_bt[:, :, None] == segments_bt[:, None, :])
        starts_bt = jnp.pad(segments_bt[:, 1:] != segments_bt[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        position_bt = position_bt - jax.lax.cummax(jnp.where(starts_bt, position_bt, 0), axis=1)
    recent_bm = jnp.full((b, model.config.token_shift), NO_TOKEN, tokens_bt.dtype)
    hidden_btd, _ = decoder(tokens_bt, recent_bm, position_bt, attends_btj, segments_bt=segments_bt, remat=remat)
    return hidden_btd


def with_cache(
    model: Model,
    params: Params,
    tokens_bt: Int[Array, "b t"],
    cache: Cache,
    attend_length: int | None,
    slot_b: Int[Array, "b"] | None = None,
    num_new_b: Int[Array, "b"] | None = None,
) -> tuple[Float[Array, "b t d"], Fresh]:
    """Hidden states, keys and values of tokens that follow rows of `cache`; the cache itself is only read.

    Args:
        attend_length: as in `readable`.
        slot_b: the row of the cache that each row of tokens follows; None is every row in order.
        num_new_b: number of valid tokens in each row, on the left; None is all. The returned states of delta layers
            are those after the valid tokens; keys and values of the other tokens must not be committed.
    """
    place_t = jnp.arange(tokens_bt.shape[1])
    length_b, recent_bm = cache.rows(slot_b)
    cached, attends_bs = readable(cache, attend_length, slot_b, None if num_new_b is None else num_new_b > 0)
    return nnx.merge(model.graphdef, params)(
        tokens_bt,
        recent_bm,
        length_b[:, None] + place_t[None, :],
        None,
        valid_bt=None if num_new_b is None else place_t[None, :] < num_new_b[:, None],
        fresh=fresh_buffer(model, cache, tokens_bt.shape[1], slot_b) if model.config.hybrid else None,
        cached=cached,
        attends_bs=attends_bs,
    )


def fresh_buffer(model: Model, cache: Cache, steps: int, slot_b: Int[Array, "b"] | None = None) -> Fresh:
    """Room for the keys and values of `steps` tokens that follow rows of `cache`, and the rows' states.

    The decode steps of a dispatch share it, each with `at=step` and, as `valid_bt`, the rows that still decode;
    `append_fresh` then puts it into the cache.
    """
    rows = cache.num_slots if slot_b is None else slot_b.shape[0]
    return empty_buffer(model.config, rows, steps)._replace(states=states_of(cache, slot_b))


def append_fresh(
    cache: Cache,
    fresh: Fresh,
    tokens_bj: Int[Array, "b j"],
    num_new_b: Int[Array, "b"],
    slot_b: Int[Array, "b"] | None = None,
) -> Cache:
    """`tbx_jax.models.cache.append` of freshly computed keys, values and states."""
    return append(cache, fresh.keys_lbjkh, fresh.values_lbjkh, tokens_bj, num_new_b, slot_b, fresh.states)


def readable(
    cache: Cache,
    attend_length: int | None,
    slot_b: Int[Array, "b"] | None = None,
    reads_b: Bool[Array, "b"] | None = None,
) -> tuple[Cached | InPlace | None, Bool[Array, "b s"] | None]:
    """The keys and values of cache rows that attention reads, and for a copy the positions that hold tokens.

    Args:
        attend_length: number of first positions to copy out, 0 for none; None reads the cache in place, as far as
            these rows go.
        slot_b: the rows; None is all of them in order.
        reads_b: False for rows whose result is not used; they are not read in place. None is all True.
    """
    length_b, _ = cache.rows(slot_b)
    if attend_length is None:
        length_b = length_b if reads_b is None else jnp.where(reads_b, length_b, 0)
        return InPlace(cache.keys_lbkhs, cache.values_lbksh, slot_b, length_b), None
    length = min(attend_length, cache.capacity)
    if length == 0:
        return None, None
    keys, values = cache.keys_lbkhs[..., :length], cache.values_lbksh[..., :length, :]
    if slot_b is not None:
        keys, values = keys[:, slot_b], values[:, slot_b]
    return Cached(keys, values), jnp.arange(length)[None, :] < length_b[:, None]


def unembed(model: Model, params: Params, hidden_btd: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Logits of the next token, float32."""
    return nnx.merge(model.graphdef, params).unembed(hidden_btd)


def token_logps(
    model: Model,
    params: Params,
    tokens_bt: Int[Array, "b t"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    segments_bt: Int[Array, "b t"] | None = None,
    remat: bool = False,
) -> Float[Array, "b t"]:
    """log pi(token t | tokens before t) in nats, at the sampling temperature.

    0.0 for a token that follows none: at position 0 and at each segment's first token. Logits of large inputs exist
    only a piece at a time; the backward pass computes each piece again.
    """
    b, t = tokens_bt.shape
    hidden_btd, _ = apply(model, params, tokens_bt, segments_bt=segments_bt, remat=remat)

    def piece(inputs: tuple[Array, Array]) -> Array:
        hidden_bcd, next_bc = inputs
        logits_bcv = unembed(model, params, hidden_bcd) / temperature
        chosen_bc = jnp.take_along_axis(logits_bcv, next_bc[..., None], axis=-1)[..., 0]
        return chosen_bc - jax.nn.logsumexp(logits_bcv, axis=-1)

    hidden_btd, next_bt = hidden_btd[:, :-1], tokens_bt[:, 1:]
    pieces = -(-b * t * model.vocabulary // _LOGITS_AT_ONCE)
    if pieces <= 1:
        logp_bt = piece((hidden_btd, next_bt))
    else:
        logp_bt = _in_pieces(jax.checkpoint(piece), hidden_btd, next_bt, min(pieces, t - 1))
    if segments_bt is not None:
        logp_bt = jnp.where(segments_bt[:, 1:] == segments_bt[:, :-1], logp_bt, 0.0)
    return jnp.pad(logp_bt, ((0, 0), (1, 0)))


def _in_pieces(
    function: Callable[[tuple[Array, Array]], Array],
    hidden_btd: Float[Array, "b t d"],
    next_bt: Int[Array, "b t"],
    pieces: int,
) -> Float[Array, "b t"]:
    """`function` over `pieces` equal parts of t, one after the other; the last is padded."""
    b, t = next_bt.shape
    size = -(-t // pieces)
    pad = pieces * size - t
    hidden = jnp.pad(hidden_btd, ((0, 0), (0, pad), (0, 0))).reshape(b, pieces, size, -1).swapaxes(0, 1)
    following = jnp.pad(next_bt, ((0, 0), (0, pad))).reshape(b, pieces, size).swapaxes(0, 1)
    return jax.lax.map(function, (hidden, following)).swapaxes(0, 1).reshape(b, -1)[:, :t]
