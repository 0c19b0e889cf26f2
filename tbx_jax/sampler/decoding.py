"""What the sampler runs on the device: take given tokens in, write tokens, keep both in the cache.

`take_in` and `write` only read the cache and return what they computed; `keep` is the only function that changes it,
in place. So dispatches for different slots may run at the same time, and each of the three is compiled once per
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
from tbx_jax.models.attention import Cached, Fresh
from tbx_jax.models.cache import Cache
from tbx_jax.models.decoder import Decoder
from tbx_jax.sampler.sampling import gumbel_noise, sample

R = TypeVar("R")

# Models with more layers are decoded with a loop over layers: compiled soon, and a copy of each layer's cache more.
_UNROLLED_LAYERS = 8
# Up to so many numbers of noise are made before the first step, which is faster than step by step: 16 MB of float32.
_NOISE_AT_ONCE = 2**22


class Unsaved(NamedTuple):
    """What was computed for some rows and is not in the cache yet.

    Attributes:
        fresh: keys and values of `tokens_bj`, and states after those that count.
        tokens_bj: ids that were fed.
        count_b: how many of them count, from the left.
    """

    fresh: Fresh
    tokens_bj: Int[Array, "b j"]
    count_b: Int[Array, "b"]


class Written(NamedTuple):
    """What a dispatch wrote: the first `count_b` places of each row."""

    tokens_bj: Int[Array, "b j"]
    logps_bj: Float[Array, "b j"]
    count_b: Int[Array, "b"]
    stopped_b: Bool[Array, "b"]


class Turns(NamedTuple):
    """What `write` must know about each row's turn.

    Attributes:
        last_b: the row's last token, which is not in the cache yet.
        key_bits_b2: of the turn's key.
        index_b: how many tokens the turn has already.
        num_left_b: how many more it may have; 0 for rows that do not write.
        temperature_b: of sampling.
    """

    last_b: Int[Array, "b"]
    key_bits_b2: UInt32[Array, "b 2"]
    index_b: Int[Array, "b"]
    num_left_b: Int[Array, "b"]
    temperature_b: Float[Array, "b"]


@functools.partial(jax.jit, static_argnames=("model", "attend_length"))
def take_in(
    model: Model,
    params: Params,
    cache: Cache,
    slot_b: Int[Array, "b"],
    tokens_bt: Int[Array, "b t"],
    num_new_b: Int[Array, "b"],
    *,
    attend_length: int | None,
) -> Unsaved:
    """Computes a chunk of given tokens for some slots; nothing is sampled.

    Args:
        attend_length: how much of the cache is taken out and read; None reads it in place.
    """
    _, fresh = with_cache(model, params, tokens_bt, cache, attend_length, slot_b, num_new_b)
    return Unsaved(fresh, tokens_bt, num_new_b)


@functools.partial(jax.jit, static_argnames=("placement",), donate_argnames=("cache",))
def keep(cache: Cache, slot_b: Int[Array, "b"] | None, unsaved: Unsaved, *, placement: Cache | None) -> Cache:
    """The cache with what was computed for some slots (None: all of them in order)."""
    cache = append_fresh(cache, unsaved.fresh, unsaved.tokens_bj, unsaved.count_b, slot_b)
    return cache if placement is None else jax.lax.with_sharding_constraint(cache, placement)


@functools.partial(jax.jit, static_argnames=("model", "steps", "draws", "top_k", "top_p", "attend_length"))
def write(
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
) -> tuple[Written, Unsaved]:
    """Up to `steps` tokens for each row; ends early when no row writes any more.

    The cache is only read; the steps keep their own keys and values in a small buffer.
    A row that has ended goes on computing, and nothing of that counts.

    Args:
        slot_b: the rows' slots; None is all of them in order.
        end_ids: tokens that end a turn.
        draws: False when every row takes the most likely token, which saves the noise.
        attend_length: how much of the cache is taken out once and read; None reads it in place.
    """
    decoder: Decoder = nnx.merge(model.graphdef, params)
    cached, attends_bs = readable(cache, attend_length, slot_b, turns.num_left_b > 0)
    buffer, apart = fresh_buffer(model, cache, steps, slot_b), None
    if isinstance(cached, Cached) and model.config.hybrid is None and model.config.num_layers <= _UNROLLED_LAYERS:
        apart, cached, buffer = decoder.layers_apart(), _apart(cached), _apart(buffer)
    length_b = cache.length_b if slot_b is None else cache.length_b[slot_b]
    place_j = jnp.arange(steps)
    noise = _Noise.of(turns, steps, model.vocabulary) if draws else None

    def step_once(state: _Steps) -> _Steps:
        hidden_btd, fresh = decoder(
            state.token_b[:, None],
            state.recent_bm,
            (length_b + state.step)[:, None],
            (place_j <= state.step)[None, None, :],
            valid_bt=state.writes_b[:, None],
            fresh=state.fresh,
            at=state.step,
            cached=cached,
            attends_bs=attends_bs,
            apart=apart,
        )
        token_b, logp_b = sample(
            decoder.unembed(hidden_btd[:, 0]),
            turns.temperature_b,
            noise.at(state.step) if noise else None,
            top_k=top_k,
            top_p=top_p,
        )
        return state.after(token_b, logp_b, fresh, turns.num_left_b, end_ids)

    recent_bm = cache.recent_bm if slot_b is None else cache.recent_bm[slot_b]
    end = jax.lax.while_loop(
        lambda state: (state.step < steps) & jnp.any(state.writes_b),
        step_once,
        _Steps.start(turns, recent_bm, buffer, steps),
    )
    fresh = end.fresh if apart is None else jax.tree.map(lambda *layers: jnp.stack(layers), *end.fresh)
    fed_bj = jnp.concatenate([turns.last_b[:, None], end.tokens_bj[:, :-1]], axis=1)
    return Written(end.tokens_bj, end.logps_bj, end.count_b, end.stopped_b), Unsaved(fresh, fed_bj, end.count_b)


def _apart(stacked: R) -> list[R]:
    """Each layer of a tree of arrays whose first axis is layers."""
    num_layers = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda leaf: leaf[layer], stacked) for layer in range(num_layers)]  # noqa: B023


class _Noise(NamedTuple):
    """Noise of a dispatch: all of it, or the keys it is made of.

    A token's noise is a function of its turn's key and its place in the turn.
    """

    vocabulary: int
    keys_jb: Array
    noise_jbv: Float[Array, "j b v"] | None

    @classmethod
    def of(cls, turns: Turns, steps: int, vocabulary: int) -> _Noise:
        key_b, place_j = as_keys(turns.key_bits_b2), jnp.arange(steps)
        fold = jax.vmap(jax.vmap(jax.random.fold_in), in_axes=(None, 0))
        keys_jb = fold(key_b, turns.index_b[None, :] + place_j[:, None])
        at_once = keys_jb.size * vocabulary <= _NOISE_AT_ONCE
        return cls(vocabulary, keys_jb, gumbel_noise(keys_jb, vocabulary) if at_once else None)

    def at(self, step: Int[Array, ""]) -> Float[Array, "b v"]:
        if self.noise_jbv is None:
            return gumbel_noise(self.keys_jb[step], self.vocabulary)
        return self.noise_jbv[step]


class _Steps(NamedTuple):
    """What one decode step hands to the next.

    Attributes:
        step: how many are done.
        token_b: each row's last token, not computed yet.
        recent_bm: the tokens before it.
        fresh: keys and values of the steps that are done, states after those that count; maybe layer by layer.
        writes_b: True while the row's turn goes on.
        tokens_bj, logps_bj, count_b, stopped_b: as in `Written`.
    """

    step: Int[Array, ""]
    token_b: Int[Array, "b"]
    recent_bm: Int[Array, "b m"]
    fresh: Fresh | list[Fresh]
    writes_b: Bool[Array, "b"]
    tokens_bj: Int[Array, "b j"]
    logps_bj: Float[Array, "b j"]
    count_b: Int[Array, "b"]
    stopped_b: Bool[Array, "b"]

    @classmethod
    def start(cls, turns: Turns, recent_bm: Int[Array, "b m"], buffer: Fresh | list[Fresh], steps: int) -> _Steps:
        b = turns.last_b.shape[0]
        return cls(
            step=jnp.int32(0),
            token_b=turns.last_b,
            recent_bm=recent_bm,
            fresh=buffer,
            writes_b=turns.num_left_b > 0,
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
        """The state when each row has sampled one token more."""
        count_b = self.count_b + self.writes_b
        ends_b = jnp.any(token_b[:, None] == end_ids[None, :], axis=1)
        return _Steps(
            step=self.step + 1,
            token_b=token_b,
            recent_bm=jnp.concatenate([self.recent_bm, self.token_b[:, None]], axis=1)[:, 1:],
            fresh=fresh,
            writes_b=self.writes_b & ~ends_b & (count_b < num_left_b),
            tokens_bj=self.tokens_bj.at[:, self.step].set(token_b),
            logps_bj=self.logps_bj.at[:, self.step].set(logp_b),
            count_b=count_b,
            stopped_b=self.stopped_b | (self.writes_b & ends_b),
        )
