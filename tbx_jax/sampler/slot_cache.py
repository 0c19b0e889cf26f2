"""The rows of the sampler's cache: arrays on the device, lengths and last tokens on the host.

A slot is the index of a row. The host passes each row's length and last tokens to every program; so a row can be
cleared, truncated or given to another episode without touching the device. Several dispatches may run at the same
time, since only `commit` changes the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from tbx_jax.config import SamplingConfig
from tbx_jax.mesh import shardings_of
from tbx_jax.models import Model, Params
from tbx_jax.models.cache import NO_TOKEN, Cache, cache_axes, empty_cache
from tbx_jax.sampler.decoding import Decoded, Turns, Uncommitted, commit, decode, prefill
from tbx_jax.sampler.dispatch_shapes import DispatchShapes, bucket, capacity_for, filled_up
from tbx_jax.sampler.memory_plan import MemoryPlan, plan_memory
from tbx_jax.sampler.swapping import swap_in, swap_out

R = TypeVar("R")  # the result of a dispatch


@dataclasses.dataclass(frozen=True, slots=True)
class SwappedRow:
    """A row in host memory.

    Attributes:
        row: arrays of the row.
        length: number of tokens in it.
        recent_m: ids of its last tokens.
    """

    row: Cache
    length: int
    recent_m: np.ndarray

    def truncated(self, tokens: Sequence[int]) -> SwappedRow:
        """The row with only these first tokens; they must be those that it was computed from."""
        no_tokens = np.full(len(self.recent_m), NO_TOKEN, np.int32)
        return dataclasses.replace(self, length=len(tokens), recent_m=_last(no_tokens, tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class TurnSoFar:
    """A turn in progress, as input of `SlotCache.decode`.

    Attributes:
        last: last token of the episode, not in the row yet.
        key_bits: bits of the turn's random key.
        num_sampled: number of tokens sampled in the turn so far.
        num_left: number of tokens that the turn may still have, at least one.
        temperature: sampling temperature.
    """

    last: int
    key_bits: np.ndarray
    num_sampled: int
    num_left: int
    temperature: float


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedRow:
    """Tokens that a dispatch sampled in a row.

    Attributes:
        tokens: token ids, at least one.
        logps: log pi of each token, in nats at the sampling temperature.
        stopped: True when the last token ends the turn.
    """

    tokens: list[int]
    logps: list[float]
    stopped: bool


# The turn of a row that only pads a group.
_IDLE_ROW = TurnSoFar(last=0, key_bits=np.zeros(2, np.uint32), num_sampled=0, num_left=0, temperature=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Call(Generic[R]):
    """A dispatch that is ready to run.

    Attributes:
        group: slots whose results are used.
        slots: slots of all rows: those of the group, and those that pad it.
        fed: slot -> tokens to prefill.
        shape: static arguments and shapes that the program is compiled for.
        function: runs the dispatch.
    """

    group: tuple[int, ...]
    slots: tuple[int, ...]
    fed: dict[int, list[int]]
    shape: tuple[str | int | None, ...]
    function: Callable[[], R]


class SlotCache:
    """A cache of `sampling.slots` rows.

    Args:
        model: model of the policy.
        sampling: number of rows, types, lengths, steps per dispatch, truncation.
        end_ids: tokens that end a turn.
        mesh: mesh of devices for the cache; None is one device.
        rules: logical axis -> mesh axis.
        params: parameters of the types that every call will get, for the memory plan; None is float32.

    Attributes:
        lengths: number of tokens in each row.
        memory: memory plan, made before anything is allocated.
        shapes: shapes that the programs are compiled for.

    Raises:
        ConfigError: the device does not have enough memory, or the mesh does not divide the cache.
    """

    def __init__(
        self,
        model: Model,
        sampling: SamplingConfig,
        end_ids: Sequence[int],
        mesh: Mesh | None,
        rules: Mapping[str, str],
        params: Params | None = None,
    ) -> None:
        self._model, self._sampling, self._end_ids = model, sampling, np.array(end_ids, np.int32)
        self._axes = cache_axes(model.config)
        capacity = capacity_for(sampling.max_episode_tokens, sampling.decode_steps)
        self.memory: MemoryPlan = plan_memory(model, sampling, capacity, mesh=mesh, rules=rules, params=params)
        self.memory.refuse_too_much()
        make = functools.partial(empty_cache, model.config, sampling.slots, capacity, sampling.cache_dtype)
        self._placement = None
        if mesh is None:
            self._cache = make()
        else:  # made in its final placement: maybe no device has memory for all of it
            self._placement = shardings_of(jax.eval_shape(make), self._axes, mesh, rules)
            self._cache = jax.jit(make, out_shardings=self._placement)()
        self.shapes = DispatchShapes.choose(
            sampling.slots,
            sampling.max_episode_tokens,
            parameter_bytes=self.memory.parameters,
            position_bytes=self._cache.position_bytes,
            num_devices=mesh.size if mesh else 1,
        )
        self.lengths = np.zeros(sampling.slots, np.int32)
        self._recent = np.full((sampling.slots, model.config.token_shift), NO_TOKEN, np.int32)
        self._threads = ThreadPoolExecutor(self.shapes.threads, "tbx-sampler") if self.shapes.threads > 1 else None
        self._compiled: set[tuple[str | int | None, ...]] = set()

    def clear(self, slot: int) -> None:
        """Empties a row."""
        self.truncate(slot, [])

    def truncate(self, slot: int, tokens: Sequence[int]) -> None:
        """Leaves only these first tokens in a row; they must be those that it was computed from."""
        self.lengths[slot] = len(tokens)
        self._recent[slot] = _last(np.full(self._recent.shape[1], NO_TOKEN, np.int32), tokens)

    def swap_out(self, slot: int) -> SwappedRow:
        """A copy of the row in host memory."""
        length = int(self.lengths[slot])
        return SwappedRow(swap_out(self._cache, self._axes, slot, length), length, self._recent[slot].copy())

    def swap_in(self, slot: int, swapped: SwappedRow) -> None:
        """Puts a swapped row back, in any slot."""
        self._cache = swap_in(self._cache, self._axes, slot, swapped.row, placement=self._placement)
        self.lengths[slot], self._recent[slot] = swapped.length, swapped.recent_m

    def prefill(self, params: Params, given: Mapping[int, Sequence[int]]) -> None:
        """Computes these tokens after those that the rows hold, and commits them, chunk by chunk."""
        left = {slot: list(tokens) for slot, tokens in given.items() if len(tokens)}
        while left:
            calls = [
                self._prefill_call(params, {slot: left[slot] for slot in group})
                for group in self.shapes.prefill_groups(
                    {slot: len(tokens) for slot, tokens in left.items()}, self._lengths_of(left)
                )
            ]
            for call, uncommitted in _last_first(calls, self._run(calls)):
                self._commit(call.slots, uncommitted, call.fed)
            fed = {slot: tokens for call in calls for slot, tokens in call.fed.items()}
            left = {slot: rest for slot in left if (rest := left[slot][len(fed[slot]) :])}

    def decode(self, params: Params, turns: Mapping[int, TurnSoFar]) -> dict[int, DecodedRow]:
        """Up to `decode_steps` tokens in each of these rows; short rows are grouped, and read less of the cache."""
        calls = [
            self._decode_call(params, {slot: turns[slot] for slot in group}, rows)
            for group, rows in self.shapes.decode_groups(self._lengths_of(turns))
        ]
        rows: dict[int, DecodedRow] = {}
        for call, (on_device, uncommitted) in _last_first(calls, self._run(calls)):
            decoded = rows_of(jax.device_get(on_device), call.group, call.slots)
            fed = {slot: [turns[slot].last, *row.tokens[:-1]] for slot, row in decoded.items()}
            self._commit(call.slots, uncommitted, fed)
            rows |= decoded
        return rows

    def _prefill_call(self, params: Params, left: Mapping[int, list[int]]) -> _Call[Uncommitted]:
        """A chunk for each of these slots, as long as the longest of them needs."""
        slots = filled_up(list(left), bucket(len(left), self.shapes.prefill_rows), len(self.lengths))
        chunk = self.shapes.chunk(max(map(len, left.values())))
        attend_length = self.shapes.prefill_length(self._longest(left))
        fed = {slot: tokens[:chunk] for slot, tokens in left.items()}
        tokens_bt = np.array([_first(fed.get(slot, []), chunk) for slot in slots], np.int32)
        num_new_b = np.array([len(fed.get(slot, [])) for slot in slots], np.int32)
        function = functools.partial(
            prefill,
            self._model,
            params,
            self._for_programs(),
            np.array(slots, np.int32),
            tokens_bt,
            num_new_b,
            attend_length=attend_length,
        )
        return _Call(tuple(left), tuple(slots), fed, ("prefill", *tokens_bt.shape, attend_length), function)

    def _decode_call(
        self, params: Params, turns: Mapping[int, TurnSoFar], rows: int
    ) -> _Call[tuple[Decoded, Uncommitted]]:
        slots = filled_up(list(turns), rows, len(self.lengths))
        in_rows = [turns.get(slot, _IDLE_ROW) for slot in slots]
        attend_length = self.shapes.decode_length(self._longest(turns))
        draws = any(turn.temperature > 0 for turn in turns.values())
        function = functools.partial(
            decode,
            self._model,
            params,
            self._for_programs(),
            self._slot_b(slots),
            Turns(
                last_b=np.array([turn.last for turn in in_rows], np.int32),
                key_bits_b2=np.array([turn.key_bits for turn in in_rows], np.uint32),
                index_b=np.array([turn.num_sampled for turn in in_rows], np.int32),
                num_left_b=np.array([turn.num_left for turn in in_rows], np.int32),
                temperature_b=np.array([turn.temperature for turn in in_rows], np.float32),
            ),
            self._end_ids,
            steps=self._sampling.decode_steps,
            draws=draws,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            attend_length=attend_length,
        )
        return _Call(tuple(turns), tuple(slots), {}, ("decode", len(slots), draws, attend_length), function)

    def _run(self, calls: Sequence[_Call[R]]) -> list[R]:
        """The results of the calls, in their order; in parallel where the machine gains from it."""
        if self._threads is None or len(calls) == 1:
            return [call.function() for call in calls]
        # Two threads that run a new shape at the same time would both compile it.
        first = {call.shape: call for call in calls if call.shape not in self._compiled}
        done = {id(call): jax.block_until_ready(call.function()) for call in first.values()}
        self._compiled |= first.keys()
        rest = [call for call in calls if id(call) not in done]
        outcomes = self._threads.map(lambda call: jax.block_until_ready(call.function()), rest)
        done |= {id(call): outcome for call, outcome in zip(rest, outcomes, strict=True)}
        return [done[id(call)] for call in calls]

    def _commit(self, slots: Sequence[int], uncommitted: Uncommitted, fed: Mapping[int, list[int]]) -> None:
        """Appends the results of a dispatch to the cache.

        Args:
            slots: slots of all rows of the dispatch.
            uncommitted: its results.
            fed: slot -> valid tokens.
        """
        self._cache = commit(self._for_programs(), self._slot_b(slots), uncommitted, placement=self._placement)
        for slot, tokens in fed.items():
            self.lengths[slot] += len(tokens)
            self._recent[slot] = _last(self._recent[slot], tokens)

    def _for_programs(self) -> Cache:
        """The cache with the host's current lengths and last tokens."""
        return self._cache._replace(length_b=self.lengths.copy(), recent_bm=self._recent.copy())

    def _slot_b(self, slots: Sequence[int]) -> np.ndarray | None:
        return np.array(slots, np.int32) if len(slots) < len(self.lengths) else None

    def _lengths_of(self, slots: Iterable[int]) -> dict[int, int]:
        return {slot: int(self.lengths[slot]) for slot in slots}

    def _longest(self, slots: Iterable[int]) -> int:
        return int(max(self.lengths[slot] for slot in slots))


def _last_first(calls: Sequence[_Call[R]], results: Sequence[R]) -> Iterator[tuple[_Call[R], R]]:
    """The order of commits: slots of other groups may pad the last group, so it is committed first."""
    return zip(reversed(calls), reversed(results), strict=True)


def rows_of(decoded: Decoded, group: Sequence[int], slots: Sequence[int]) -> dict[int, DecodedRow]:
    """Slot -> its sampled tokens, for the slots of the group."""
    parts = {}
    for row, slot in enumerate(slots):
        if slot in group:
            count = int(decoded.count_b[row])
            tokens, logps = decoded.tokens_bj[row, :count].tolist(), decoded.logps_bj[row, :count].tolist()
            parts[slot] = DecodedRow(tokens, logps, bool(decoded.stopped_b[row]))
    return parts


def _first(tokens: Sequence[int], count: int) -> list[int]:
    return [*tokens, *[0] * (count - len(tokens))]


def _last(before_m: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """The last `m` ids after these tokens are appended."""
    reach = len(before_m)
    known = np.concatenate([before_m, np.array(tokens[-reach:], np.int32)])
    return known[len(known) - reach :] if reach else before_m
