"""The sampler's programs on the device: prefill given tokens, decode new ones, commit both to the cache.

`prefill` and `decode` only read the cache and return their results; `commit` is the only function that changes it, in
place. So dispatches for different rows may run at the same time, and each of the three is compiled once for each
combination of its static arguments and shapes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from tbx_jax.keys import as_keys
from tbx_jax.models import Model, Params, append_fresh, fresh_buffer, readable, with_cache
from tbx_jax.models.attention import Cached, Fresh, InPlace
from tbx_jax.models.cache import Cache
from tbx_jax.models.decoder import Decoder
from tbx_jax.sampler.sampling import gumbel_noise, sample
from tbx_jax.shapes import HostOrDevice

R = TypeVar("R")

# Models with more layers are decoded with a scan over layers: it compiles faster, and copies each layer's cache once.
_UNROLLED_LAYERS = 8
# Up to this size, noise is drawn before the first step, which is faster than step by step: 16 MB of float32.
_NOISE_AT_ONCE = 2**22


class Uncommitted(NamedTuple):
    """Results for some rows that are not committed to the cache yet.

    Attributes:
        fresh: keys and values of `tokens_bj`, and states after the valid ones.
        tokens_bj: ids that were fed to the model.
        count_b: number of valid tokens in each row, on the left.
    """

    fresh: Fresh
    tokens_bj: Int[Array, "b j"]
    count_b: Int[Array, "b"]


class Decoded(NamedTuple):
    """Tokens sampled by a dispatch: the first `count_b` of each row are valid.

    Attributes:
        tokens_bj: token ids.
        logps_bj: log pi of each token, in nats at the sampling temperature.
        count_b: number of valid tokens in each row.
        stopped_b: True when the last valid token ends the turn.
    """

    tokens_bj: Int[Array, "b j"]
    logps_bj: Float[Array, "b j"]
    count_b: Int[Array, "b"]
    stopped_b: Bool[Array, "b"]


class Turns(NamedTuple):
    """The turn of each row, as input of `decode`: built on the host, read on the device.

    Attributes:
        last_b: last token of the row, not in the cache yet.
        key_bits_b2: bits of the turn's random key.
        index_b: number of tokens that the turn has already.
        num_left_b: number of tokens that the turn may still have; 0 for idle rows.
        temperature_b: sampling temperature.
    """

    last_b: Int[HostOrDevice, "b"]
    key_bits_b2: UInt32[HostOrDevice, "b 2"]
    index_b: Int[HostOrDevice, "b"]
    num_left_b: Int[HostOrDevice, "b"]
    temperature_b: Float[HostOrDevice, "b"]


@functools.partial(jax.jit, static_argnames=("model", "attend_length"))
def prefill(
    model: Model,
    params: Params,
    cache: Cache,
    slot_b: Int[Array, "b"],
    tokens_bt: Int[Array, "b t"],
    num_new_b: Int[Array, "b"],
    *,
    attend_length: int | None,
) -> Uncommitted:
    """Keys, values and states of a chunk of given tokens in some cache rows; nothing is sampled.

    Args:
        slot_b: indices of the cache rows.
        tokens_bt: chunk of each row, valid tokens on the left.
        num_new_b: number of valid tokens in each chunk.
        attend_length: number of cache positions to copy out and read; None reads the cache in place.
    """
    _, fresh = with_cache(model, params, tokens_bt, cache, attend_length, slot_b, num_new_b)
    return Uncommitted(fresh, tokens_bt, num_new_b)


@functools.partial(jax.jit, static_argnames=("placement",), donate_argnames=("cache",))
def commit(cache: Cache, slot_b: Int[Array, "b"] | None, uncommitted: Uncommitted, *, placement: Cache | None) -> Cache:
    """The cache with the results for some rows (`slot_b` None: all of them in order) appended.

    Takes ownership of `cache`: its buffers are donated.
    """
    cache = append_fresh(cache, uncommitted.fresh, uncommitted.tokens_bj, uncommitted.count_b, slot_b)
    return cache if placement is None else jax.lax.with_sharding_constraint(cache, placement)


@functools.partial(jax.jit, static_argnames=("model", "steps", "draws", "top_k", "top_p", "attend_length"))
def decode(
    model: Model,
    params: Params,
    cache: Cache,
    slot_b: Int[Array, "b"] | None,
    turns: Turns,
    end_ids: Int[Array, " ends"],
    *,
    steps: int,
    draws: bool,
    top_k: int | None,
    top_p: float,
    attend_length: int | None,
) -> tuple[Decoded, Uncommitted]:
    """Up to `steps` sampled tokens for each row; ends early when every turn has ended.

    The cache is only read; keys and values of the steps are in a small buffer. A row whose turn has ended is still
    computed, and its results are ignored.

    Args:
        slot_b: indices of the cache rows; None is all of them in order.
        turns: turn of each row.
        end_ids: tokens that end a turn.
        steps: number of decode steps.
        draws: False when every row takes the most likely token, which needs no noise.
        top_k, top_p: as in `tbx_jax.sampler.sampling.truncate`.
        attend_length: number of cache positions to copy out once and read; None reads the cache in place.
    """
    last_b, key_bits_b2, index_b, num_left_b, temperature_b = map(jnp.asarray, turns)  # on the device already
    decoder: Decoder = nnx.merge(model.graphdef, params)
    whole, attends_bs = readable(cache, attend_length, slot_b, num_left_b > 0)
    stacked_buffer = fresh_buffer(model, cache, steps, slot_b)
    buffer: Fresh | list[Fresh] = stacked_buffer
    cached: Cached | list[Cached] | InPlace | None = whole
    apart = None
    if isinstance(whole, Cached) and model.config.hybrid is None and model.config.num_layers <= _UNROLLED_LAYERS:
        apart, cached, buffer = decoder.layers_apart(), _apart(whole), _apart(stacked_buffer)
    length_b, recent_bm = cache.rows(slot_b)
    place_j = jnp.arange(steps)
    noise = _Noise.of(key_bits_b2, index_b, steps, model.vocabulary) if draws else None

    def step_once(state: _Steps) -> _Steps:
        hidden_btd, fresh = decoder(
            state.token_b[:, None],
            state.recent_bm,
            (length_b + state.step)[:, None],
            (place_j <= state.step)[None, None, :],
            valid_bt=state.active_b[:, None],
            fresh=state.fresh,
            at=state.step,
            cached=cached,
            attends_bs=attends_bs,
            apart=apart,
        )
        token_b, logp_b = sample(
            decoder.unembed(hidden_btd[:, 0]),
            temperature_b,
            noise.at(state.step) if noise else None,
            top_k=top_k,
            top_p=top_p,
        )
        return state.after(token_b, logp_b, fresh, num_left_b, end_ids)

    end = jax.lax.while_loop(
        lambda state: (state.step < steps) & jnp.any(state.active_b),
        step_once,
        _Steps.start(last_b, num_left_b, recent_bm, buffer, steps),
    )
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *end.fresh) if isinstance(end.fresh, list) else end.fresh
    fed_bj = jnp.concatenate([last_b[:, None], end.tokens_bj[:, :-1]], axis=1)
    return Decoded(end.tokens_bj, end.logps_bj, end.count_b, end.stopped_b), Uncommitted(stacked, fed_bj, end.count_b)


def _apart(stacked: R) -> list[R]:
    """Each layer of a tree of arrays whose first axis is `l`."""
    num_layers = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda leaf: leaf[layer], stacked) for layer in range(num_layers)]  # noqa: B023


class _Noise(NamedTuple):
    """Noise of a dispatch, or the keys to draw it with.

    A token's noise is a function of its turn's key and its index in the turn.

    Attributes:
        vocabulary: number of token ids.
        keys_jb: random key of each decode step and row.
        noise_jbv: noise of all steps; None when it is drawn step by step.
    """

    vocabulary: int
    keys_jb: Array
    noise_jbv: Float[Array, "j b v"] | None

    @classmethod
    def of(cls, key_bits_b2: UInt32[Array, "b 2"], index_b: Int[Array, "b"], steps: int, vocabulary: int) -> _Noise:
        key_b, place_j = as_keys(key_bits_b2), jnp.arange(steps)
        fold = jax.vmap(jax.vmap(jax.random.fold_in), in_axes=(None, 0))
        keys_jb = fold(key_b, index_b[None, :] + place_j[:, None])
        at_once = keys_jb.size * vocabulary <= _NOISE_AT_ONCE
        return cls(vocabulary, keys_jb, gumbel_noise(keys_jb, vocabulary) if at_once else None)

    def at(self, step: Int[Array, ""]) -> Float[Array, "b v"]:
        if self.noise_jbv is None:
            return gumbel_noise(self.keys_jb[step], self.vocabulary)
        return self.noise_jbv[step]


class _Steps(NamedTuple):
    """The carry of the loop over decode steps.

    Attributes:
        step: number of completed steps.
        token_b: last token of each row, not fed yet.
        recent_bm: tokens before it.
        fresh: keys and values of the completed steps, states after the valid ones; a list has an entry for each layer.
        active_b: True until the row's turn ends.
        tokens_bj, logps_bj, count_b, stopped_b: as in `Decoded`.
    """

    step: Int[Array, ""]
    token_b: Int[Array, "b"]
    recent_bm: Int[Array, "b m"]
    fresh: Fresh | list[Fresh]
    active_b: Bool[Array, "b"]
    tokens_bj: Int[Array, "b j"]
    logps_bj: Float[Array, "b j"]
    count_b: Int[Array, "b"]
    stopped_b: Bool[Array, "b"]

    @classmethod
    def start(
        cls,
        last_b: Int[Array, "b"],
        num_left_b: Int[Array, "b"],
        recent_bm: Int[Array, "b m"],
        buffer: Fresh | list[Fresh],
        steps: int,
    ) -> _Steps:
        b = last_b.shape[0]
        return cls(
            step=jnp.int32(0),
            token_b=last_b,
            recent_bm=recent_bm,
            fresh=buffer,
            active_b=num_left_b > 0,
            tokens_bj=jnp.zeros((b, steps), jnp.int32),
            logps_bj=jnp.zeros((b, steps), jnp.float32),
            count_b=jnp.zeros((b,), jnp.int32),
            stopped_b=jnp.zeros((b,), bool),
        )

    def after(
        self,
        token_b: Int[Array, "b"],
        logp_b: Float[Array, "b"],
        fresh: Fresh | list[Fresh],
        num_left_b: Int[Array, "b"],
        end_ids: Int[Array, " ends"],
    ) -> _Steps:
        """The state after each row has sampled one more token."""
        count_b = self.count_b + self.active_b
        ends_b = jnp.any(token_b[:, None] == end_ids[None, :], axis=1)
        return _Steps(
            step=self.step + 1,
            token_b=token_b,
            recent_bm=jnp.concatenate([self.recent_bm, self.token_b[:, None]], axis=1)[:, 1:],
            fresh=fresh,
            active_b=self.active_b & ~ends_b & (count_b < num_left_b),
            tokens_bj=self.tokens_bj.at[:, self.step].set(token_b),
            logps_bj=self.logps_bj.at[:, self.step].set(logp_b),
            count_b=count_b,
            stopped_b=self.stopped_b | (self.active_b & ends_b),
        )
