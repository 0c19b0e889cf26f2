"""The sampler: many episodes written together, each in a slot whose cache lives as long as the episode.

    sampler.begin(0, prompt, ("clinic/x/001", 0, 0))     # a fresh episode; asks for its first turn
    while sampler.busy:
        for turn in sampler.advance(params):             # turns that ended
            sampler.extend(turn.slot, answer, ("clinic/x/001", 0, 1))   # or sampler.free(turn.slot)

`advance` first takes in the given tokens of every waiting slot (chunked prefill, slots of like need together), then
runs up to `decode_steps` decode steps in one dispatch. Nothing is computed twice over an episode's turns.

The invariant: of an episode's n tokens, given and sampled, the cache holds the first n - 1 or fewer. The last one is
fed by the decode step that samples the next, so every sampled token comes out of the same code, and an end-of-turn
token enters the cache with the tokens of the next turn.

The host knows each slot's tokens; only keys and values live on the device. A token depends on (seed, turn key, its
index in the turn) and on the episode's tokens, not on its slot or its neighbours (other shapes may round otherwise in
the last bit). Nothing here looks at a clock. A slot's cache belongs to the parameters that filled it: change them
between episodes only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from tbx_envs.errors import ActionError, ConfigError
from tbx_jax.cache import CACHE_LETTERS, NO_TOKEN, Cache, append, empty_cache
from tbx_jax.config import SamplingConfig
from tbx_jax.keys import as_keys, key_bits
from tbx_jax.mesh import shard_tree
from tbx_jax.models import Model, Params, readable, with_cache
from tbx_jax.models.decoder import Decoder, Fresh
from tbx_jax.sampling import sample

# Prefill computes chunks of these lengths; a prompt that is longer takes several.
_CHUNKS = (16, 32, 64, 128)
# Up to so many slots are always computed together.
_FEW_SLOTS = 16
# Models with more layers are decoded with a loop over layers: compiled soon, and a copy of each layer's cache more.
_UNROLLED_LAYERS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that ended.

    Attributes:
        slot: where.
        tokens: ids as sampled, the end-of-turn token included when there is one.
        logps: log pi of each, in nats at the sampling temperature.
        stopped: True when the policy wrote an end-of-turn token; False when a token limit cut the turn off, maybe
            before its first token.
    """

    slot: int
    tokens: list[int]
    logps: list[float]
    stopped: bool


@dataclasses.dataclass(slots=True)
class _Episode:
    """What the host knows about a slot in use.

    Attributes:
        tokens: of the whole episode, given and sampled.
        num_cached: how many of them the cache holds.
        key_bits: of the turn's key.
        turn_start: place in `tokens` of the turn's first token.
        logps: of the turn's tokens so far.
        waiting: True while a turn is asked for and has not been returned.
    """

    tokens: list[int]
    num_cached: int
    key_bits: np.ndarray
    turn_start: int
    logps: list[float]
    waiting: bool

    @property
    def num_unseen(self) -> int:
        """Given tokens that prefill has to compute: all that are not cached but the last."""
        return len(self.tokens) - self.num_cached - 1


class Sampler:
    """Writes turns for up to `sampling.slots` episodes at a time.

    Args:
        model: from `tbx_jax.models.build` or a loaded policy.
        chat_end_ids: tokens that end a turn.
        sampling: temperature, limits, slots, steps per dispatch.
        seed: of the run; a turn's randomness is a function of it and of the turn's key.
        mesh: where parameters and cache live; None is one device.
        rules: axis letter -> mesh axis, with `mesh`.

    Raises:
        ConfigError: an episode may become longer than the model allows, or nothing can end a turn.
    """

    def __init__(
        self,
        model: Model,
        chat_end_ids: frozenset[int],
        sampling: SamplingConfig,
        seed: int,
        *,
        mesh: Mesh | None = None,
        rules: Mapping[str, str] | None = None,
    ):
        if sampling.max_episode_tokens > model.config.max_length:
            raise ConfigError(
                f"sampling.max_episode_tokens is {sampling.max_episode_tokens}, model.max_length is "
                f"{model.config.max_length}; lower the first or choose a model for longer episodes"
            )
        if not chat_end_ids or not all(0 <= end < model.vocabulary for end in chat_end_ids):
            raise ConfigError(
                f"end-of-turn ids {sorted(chat_end_ids)} for a vocabulary of {model.vocabulary}; the chat template "
                f"must name at least one token of the model that ends a turn"
            )
        self._model, self._sampling, self._seed = model, sampling, seed
        self._end_ids = np.array(sorted(chat_end_ids), np.int32)
        self._episodes: list[_Episode | None] = [None] * sampling.slots
        self._row_buckets = _row_buckets(sampling.slots)
        room = max(*_CHUNKS, sampling.decode_steps)
        self._cache = empty_cache(model.config, sampling.slots, sampling.max_episode_tokens + room)
        self._placement = None
        if mesh is not None:
            self._cache = shard_tree(self._cache, CACHE_LETTERS, mesh, rules or {})
            self._placement = jax.tree.map(lambda leaf: leaf.sharding, self._cache)

    @property
    def busy(self) -> bool:
        """True while a turn is asked for that `advance` has not returned."""
        return any(episode is not None and episode.waiting for episode in self._episodes)

    def begin(self, slot: int, tokens: Sequence[int], turn_key: tuple[str | int, ...]) -> None:
        """Starts a fresh episode in a slot with these ids, and asks for its first turn.

        Args:
            slot: from 0; an episode that was there and is not waiting for a turn is dropped.
            tokens: the prompt, at least one id.
            turn_key: names the turn's randomness, for example (uid, attempt, turn).

        Raises:
            ActionError: a slot that does not exist or waits for a turn, or tokens the model does not have.
        """
        if not 0 <= slot < len(self._episodes):
            raise ActionError(f"slot {slot}: there are {len(self._episodes)}; use 0 to {len(self._episodes) - 1}")
        episode = self._episodes[slot]
        if episode is not None and episode.waiting:
            raise ActionError(f"slot {slot} waits for a turn; call advance() until it returns, or free({slot})")
        self._ask(slot, [], 0, tokens, turn_key)

    def extend(self, slot: int, tokens: Sequence[int], turn_key: tuple[str | int, ...]) -> None:
        """Appends ids to the slot's episode and asks for its next turn; what the cache holds is not computed again.

        Raises:
            ActionError: a slot without an episode or one that waits for a turn, or tokens the model does not have.
        """
        episode = self._episodes[slot] if 0 <= slot < len(self._episodes) else None
        if episode is None:
            raise ActionError(f"slot {slot} has no episode to extend; call begin({slot}, ...)")
        if episode.waiting:
            raise ActionError(f"slot {slot} waits for a turn; call advance() until it returns, or free({slot})")
        self._ask(slot, episode.tokens, episode.num_cached, tokens, turn_key)

    def free(self, slot: int) -> None:
        """Drops the slot's episode, also in the middle of a turn; a free slot stays free."""
        self._episodes[slot] = None

    def _ask(
        self,
        slot: int,
        before: list[int],
        num_cached: int,
        tokens: Sequence[int],
        turn_key: tuple[str | int, ...],
    ) -> None:
        given = [int(token) for token in tokens]
        if not given or not all(0 <= token < self._model.vocabulary for token in given):
            raise ActionError(
                f"slot {slot}: {len(given)} tokens, from {min(given, default=None)} to {max(given, default=None)}, "
                f"for a vocabulary of {self._model.vocabulary}; give at least one id, all of this model's tokenizer"
            )
        self._episodes[slot] = _Episode(
            tokens=before + given,
            num_cached=num_cached,
            key_bits=key_bits(self._seed, "turn", *turn_key),
            turn_start=len(before) + len(given),
            logps=[],
            waiting=True,
        )

    def advance(self, params: Params) -> list[SampledTurn]:
        """Takes in what was given, writes up to `decode_steps` tokens in every waiting slot.

        Returns:
            The turns that ended, by slot; often none. Their slots wait for `extend`, `begin` or `free`.
        """
        turns = [self._finish(slot, stopped=False) for slot in self._waiting() if self._num_left(slot) == 0]
        self._prefill(params)
        turns += self._decode(params)
        return sorted(turns, key=lambda turn: turn.slot)

    def _waiting(self) -> list[int]:
        return [slot for slot, episode in enumerate(self._episodes) if episode is not None and episode.waiting]

    def _num_left(self, slot: int) -> int:
        """How many tokens the slot's turn may still have."""
        episode, sampling = self._episodes[slot], self._sampling
        return max(
            0,
            min(
                sampling.max_turn_tokens - len(episode.logps),
                sampling.max_episode_tokens - len(episode.tokens),
            ),
        )

    def _finish(self, slot: int, *, stopped: bool) -> SampledTurn:
        episode = self._episodes[slot]
        episode.waiting = False
        return SampledTurn(slot, episode.tokens[episode.turn_start :], episode.logps, stopped)

    def _prefill(self, params: Params) -> None:
        """Computes given tokens until each waiting slot has one token left for the decode step to feed."""
        while unseen := {slot: num for slot in self._waiting() if (num := self._episodes[slot].num_unseen) > 0}:
            most_first = sorted(unseen, key=lambda slot: (-unseen[slot], slot))
            slots = self._padded(most_first[: self._row_buckets[-1]])
            chunk = _bucket(unseen[most_first[0]], _CHUNKS)
            tokens_bt, num_new_b = np.zeros((len(slots), chunk), np.int32), np.zeros(len(slots), np.int32)
            for row, slot in enumerate(slots):
                if slot in unseen:
                    episode = self._episodes[slot]
                    num_new_b[row] = min(unseen[slot], chunk)
                    given = episode.tokens[episode.num_cached : episode.num_cached + num_new_b[row]]
                    tokens_bt[row, : len(given)] = given
            self._cache = _prefill(
                self._model,
                params,
                self._host_cache(),
                np.array(slots, np.int32),
                tokens_bt,
                num_new_b,
                attend_length=self._attend_length(slot for slot in slots if slot in unseen),
                placement=self._placement,
            )
            for slot, num_new in zip(slots, num_new_b.tolist(), strict=True):
                if slot in unseen:
                    self._episodes[slot].num_cached += num_new

    def _decode(self, params: Params) -> list[SampledTurn]:
        """One dispatch of decode steps for each group of waiting slots; short episodes do not read as far."""
        waiting = sorted(self._waiting(), key=lambda slot: (self._episodes[slot].num_cached, slot))
        groups = _groups(waiting, self._row_buckets[-1])
        dispatched = [(group, *self._dispatch(params, group)) for group in groups]
        turns = []
        for group, slots, on_device in dispatched:
            written: _Written = jax.device_get(on_device)
            for row, slot in enumerate(slots):
                if slot not in group:
                    continue
                episode, count = self._episodes[slot], int(written.count_b[row])
                episode.tokens += written.tokens_bj[row, :count].tolist()
                episode.logps += written.logps_bj[row, :count].tolist()
                episode.num_cached += count
                if written.stopped_b[row] or self._num_left(slot) == 0:
                    turns.append(self._finish(slot, stopped=bool(written.stopped_b[row])))
        return turns

    def _dispatch(self, params: Params, group: list[int]) -> tuple[list[int], _Written]:
        """Starts decode steps for these slots; returns the slot of each row, and what will have been written."""
        slots = self._padded(group)
        episodes = [self._episodes[slot] if slot in group else None for slot in slots]
        self._cache, written = _decode(
            self._model,
            params,
            self._host_cache(),
            np.array(slots, np.int32) if len(slots) < len(self._episodes) else None,
            np.array([episode.tokens[-1] if episode else 0 for episode in episodes], np.int32),
            np.array([episode.key_bits if episode else (0, 0) for episode in episodes], np.uint32),
            np.array([len(episode.logps) if episode else 0 for episode in episodes], np.int32),
            np.array([self._num_left(slot) if slot in group else 0 for slot in slots], np.int32),
            self._end_ids,
            steps=self._sampling.decode_steps,
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            attend_length=self._attend_length(group),
            placement=self._placement,
        )
        return slots, written

    def _attend_length(self, slots: Iterable[int]) -> int:
        longest = max(self._episodes[slot].num_cached for slot in slots)
        return min(_length_bucket(longest), self._sampling.max_episode_tokens)

    def _padded(self, slots: list[int]) -> list[int]:
        """These slots, and as many others as fill a compiled shape; the valid part of the others stays as it is."""
        rows = _bucket(len(slots), self._row_buckets)
        others = (slot for slot in range(len(self._episodes)) if slot not in slots)
        return sorted([*slots, *itertools.islice(others, rows - len(slots))])

    def _host_cache(self) -> Cache:
        """The cache with the lengths and last tokens that the host knows; this is what makes a slot start empty."""
        reach = self._model.config.token_shift
        length_b = np.zeros(len(self._episodes), np.int32)
        recent_bm = np.full((len(self._episodes), reach), NO_TOKEN, np.int32)
        for slot, episode in enumerate(self._episodes):
            if episode is not None and episode.num_cached:
                length_b[slot] = episode.num_cached
                last = episode.tokens[max(0, episode.num_cached - reach) : episode.num_cached]
                recent_bm[slot, reach - len(last) :] = last
        return self._cache._replace(length_b=length_b, recent_bm=recent_bm)


def _row_buckets(slots: int) -> tuple[int, ...]:
    """Numbers of rows that a dispatch is compiled for; the last is the most that go together.

    On a CPU a row costs the same in a small group as in a large one, and groups of like length read less of the
    cache. An accelerator wants all rows at once.
    """
    if slots <= _FEW_SLOTS:
        return (slots,)
    quarter = -(-slots // 4)
    return (-(-slots // 16), quarter) if jax.default_backend() == "cpu" else (quarter, slots)


def _groups(slots: list[int], rows: int) -> list[list[int]]:
    """The slots in groups of `rows`; the group that is not full goes first.

    It is padded with slots of later groups, which write over what it left behind their tokens. A slot that was
    dispatched already has new tokens there that the host has not seen yet.
    """
    edges = [0, *range(len(slots) % rows or rows, len(slots), rows), len(slots)]
    return [slots[start:end] for start, end in itertools.pairwise(edges) if start < end]


def _length_bucket(longest: int) -> int:
    """How much of the cache to read when the longest row has `longest` tokens: 0, 64, 96, 128, 192, 256, ..."""
    if longest == 0:
        return 0
    length = 64
    while length < longest:
        length += length // 2 if length & (length - 1) == 0 else length // 3
    return length


def _bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`, or the largest there is."""
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])


@functools.partial(jax.jit, static_argnames=("model", "attend_length", "placement"), donate_argnames=("cache",))
def _prefill(
    model: Model,
    params: Params,
    cache: Cache,
    slot_b: Int[Array, "b"],
    tokens_bt: Int[Array, "b t"],
    num_new_b: Int[Array, "b"],
    *,
    attend_length: int,
    placement: Cache | None,
) -> Cache:
    """The cache after some slots took in a chunk of given tokens; nothing is sampled."""
    _, fresh = with_cache(model, params, tokens_bt, cache, attend_length, slot_b)
    cache = append(cache, fresh.keys_lbjkh, fresh.values_lbjkh, tokens_bt, num_new_b, slot_b)
    return cache if placement is None else jax.lax.with_sharding_constraint(cache, placement)


class _Written(NamedTuple):
    """What a dispatch wrote: the first `count_b` places of each row."""

    tokens_bj: Int[Array, "b j"]
    logps_bj: Float[Array, "b j"]
    count_b: Int[Array, "b"]
    stopped_b: Bool[Array, "b"]


@functools.partial(
    jax.jit,
    static_argnames=("model", "steps", "temperature", "top_k", "top_p", "attend_length", "placement"),
    donate_argnames=("cache",),
)
def _decode(
    model: Model,
    params: Params,
    cache: Cache,
    slot_b: Int[Array, "b"] | None,
    last_b: Int[Array, "b"],
    key_bits_b2: UInt32[Array, "b 2"],
    index_b: Int[Array, "b"],
    num_left_b: Int[Array, "b"],
    end_ids: Int[Array, " ends"],
    *,
    steps: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    attend_length: int,
    placement: Cache | None,
) -> tuple[Cache, _Written]:
    """Up to `steps` tokens for each row; ends early when no row writes any more.

    The cache is read only, and its part that is read is taken out once; the steps keep their own keys and values in
    a small buffer that is appended at the end. A row that has ended goes on computing, and nothing of that is kept.

    Args:
        slot_b: the rows' slots; None is all of them in order.
        last_b: each row's last token, which is not in the cache yet.
        key_bits_b2: of the turn's key.
        index_b: how many tokens the turn has already.
        num_left_b: how many more it may have; 0 for rows that do not write.
        end_ids: tokens that end a turn.
    """
    decoder: Decoder = nnx.merge(model.graphdef, params)
    config, b = model.config, last_b.shape[0]
    cached, attends_bs = readable(cache, attend_length, slot_b)
    if cached is not None and config.num_layers <= _UNROLLED_LAYERS:
        cached = cached.layers()
    length_b = cache.length_b if slot_b is None else cache.length_b[slot_b]
    recent_bm = cache.recent_bm if slot_b is None else cache.recent_bm[slot_b]
    key_b, place_j = as_keys(key_bits_b2), jnp.arange(steps)
    buffer = jnp.zeros((config.num_layers, b, steps, config.num_kv_heads, config.head_width), config.dtype)

    def step_once(state: _Steps) -> _Steps:
        hidden_btd, fresh = decoder(
            state.token_b[:, None],
            state.recent_bm,
            (length_b + state.step)[:, None],
            (place_j <= state.step)[None, None, :],
            fresh=state.fresh,
            at=state.step,
            cached=cached,
            attends_bs=attends_bs,
        )
        step_key_b = jax.vmap(jax.random.fold_in)(key_b, index_b + state.step)
        token_b, logp_b = sample(
            step_key_b, decoder.unembed(hidden_btd[:, 0]), temperature=temperature, top_k=top_k, top_p=top_p
        )
        count_b = state.count_b + state.writes_b
        ends_b = jnp.any(token_b[:, None] == end_ids[None, :], axis=1)
        return _Steps(
            step=state.step + 1,
            token_b=token_b,
            recent_bm=jnp.concatenate([state.recent_bm, state.token_b[:, None]], axis=1)[:, 1:],
            fresh=fresh,
            writes_b=state.writes_b & ~ends_b & (count_b < num_left_b),
            tokens_bj=state.tokens_bj.at[:, state.step].set(token_b),
            logps_bj=state.logps_bj.at[:, state.step].set(logp_b),
            count_b=count_b,
            stopped_b=state.stopped_b | (state.writes_b & ends_b),
        )

    end = jax.lax.while_loop(
        lambda state: (state.step < steps) & jnp.any(state.writes_b),
        step_once,
        _Steps(
            step=jnp.int32(0),
            token_b=last_b,
            recent_bm=recent_bm,
            fresh=Fresh(buffer, buffer),
            writes_b=num_left_b > 0,
            tokens_bj=jnp.zeros((b, steps), jnp.int32),
            logps_bj=jnp.zeros((b, steps), jnp.float32),
            count_b=jnp.zeros((b,), jnp.int32),
            stopped_b=jnp.zeros((b,), bool),
        ),
    )
    fed_bj = jnp.concatenate([last_b[:, None], end.tokens_bj[:, :-1]], axis=1)
    cache = append(cache, end.fresh.keys_lbjkh, end.fresh.values_lbjkh, fed_bj, end.count_b, slot_b)
    if placement is not None:
        cache = jax.lax.with_sharding_constraint(cache, placement)
    return cache, _Written(end.tokens_bj, end.logps_bj, end.count_b, end.stopped_b)


class _Steps(NamedTuple):
    """What one decode step hands to the next.

    Attributes:
        step: how many are done.
        token_b: each row's last token, not computed yet.
        recent_bm: the tokens before it.
        fresh: keys and values of the steps that are done.
        writes_b: True while the row's turn goes on.
        tokens_bj, logps_bj, count_b, stopped_b: as in `_Written`.
    """

    step: Int[Array, ""]
    token_b: Int[Array, "b"]
    recent_bm: Int[Array, "b m"]
    fresh: Fresh
    writes_b: Bool[Array, "b"]
    tokens_bj: Int[Array, "b j"]
    logps_bj: Float[Array, "b j"]
    count_b: Int[Array, "b"]
    stopped_b: Bool[Array, "b"]
