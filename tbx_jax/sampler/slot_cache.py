"""The rows of the sampler's cache: what is on the device, and what the host knows of it.

A row is a slot. The host keeps each row's length and last tokens, and gives them to every program; that is what makes
a row start empty, forget its end or belong to another episode without touching the device. Several dispatches may run
at the same time, since only `keep` changes the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tbx_jax.config import SamplingConfig
from tbx_jax.mesh import shardings_of
from tbx_jax.models import Model, Params
from tbx_jax.models.cache import NO_TOKEN, Cache, cache_letters, empty_cache
from tbx_jax.sampler.decoding import Turns, Unsaved, Written, keep, take_in, write
from tbx_jax.sampler.dispatch_shapes import DispatchShapes, bucket, capacity_for, filled_up
from tbx_jax.sampler.memory_plan import MemoryPlan, plan_memory
from tbx_jax.sampler.swapping import put_row, take_row


@dataclasses.dataclass(frozen=True, slots=True)
class Parked:
    """A row in host memory.

    Attributes:
        row: its arrays.
        length: tokens in it.
        recent_m: the last of them.
    """

    row: Cache
    length: int
    recent_m: np.ndarray

    def cut(self, tokens: Sequence[int]) -> Parked:
        """The same with all forgotten but these first tokens, which the caller knows."""
        no_tokens = np.full(len(self.recent_m), NO_TOKEN, np.int32)
        return dataclasses.replace(self, length=len(tokens), recent_m=_last(no_tokens, tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class TurnSoFar:
    """What a row needs to go on writing its turn.

    Attributes:
        last: the episode's last token, which the row does not hold yet.
        key_bits: of the turn's key.
        num_written: tokens of the turn so far.
        num_left: how many more it may have, at least one.
        temperature: of sampling.
    """

    last: int
    key_bits: np.ndarray
    num_written: int
    num_left: int
    temperature: float


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenRow:
    """What a dispatch wrote in a slot.

    Attributes:
        tokens: at least one.
        logps: log pi of each, in nats at the sampling temperature.
        stopped: the last token ends the turn.
    """

    tokens: list[int]
    logps: list[float]
    stopped: bool


# A row that only fills a group up.
_SITS_OUT = TurnSoFar(last=0, key_bits=np.zeros(2, np.uint32), num_written=0, num_left=0, temperature=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A dispatch that is ready to run.

    Attributes:
        group: slots that it is for.
        slots: of each row, the group's and those that fill it up.
        fed: slot -> tokens that it takes in.
        shape: what it is compiled for.
        function: runs it.
    """

    group: tuple[int, ...]
    slots: tuple[int, ...]
    fed: dict[int, list[int]]
    shape: tuple[Any, ...]
    function: Callable[[], Any]


class SlotCache:
    """A row for each of `sampling.slots` slots.

    Args:
        model: whose tokens are computed.
        sampling: slots, types, lengths, steps per dispatch, truncation.
        end_ids: tokens that end a turn.
        mesh: where the cache lives; None is one device.
        rules: axis letter -> mesh axis.
        params: such as every call will get them, for the reckoning of memory; None is float32.

    Attributes:
        lengths: tokens in each row.
        memory: what was reckoned before anything was allocated.

    Raises:
        ConfigError: the device has not enough memory, or the mesh does not fit.
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
        self._letters = cache_letters(model.config)
        capacity = capacity_for(sampling.max_episode_tokens, sampling.decode_steps)
        self.memory: MemoryPlan = plan_memory(model, sampling, capacity, mesh=mesh, rules=rules, params=params)
        self.memory.refuse_too_much()
        make = functools.partial(empty_cache, model.config, sampling.slots, capacity, sampling.cache_dtype)
        self._placement = None
        if mesh is None:
            self._cache = make()
        else:  # made where it lives: no device may have room for all of it
            self._placement = shardings_of(jax.eval_shape(make), self._letters, mesh, rules)
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
        self._compiled: set[tuple[Any, ...]] = set()

    def empty(self, slot: int) -> None:
        """Forgets what the row holds."""
        self.cut(slot, [])

    def cut(self, slot: int, tokens: Sequence[int]) -> None:
        """Forgets all but these first tokens of the row, which the caller knows."""
        self.lengths[slot] = len(tokens)
        self._recent[slot] = _last(np.full(self._recent.shape[1], NO_TOKEN, np.int32), tokens)

    def park(self, slot: int) -> Parked:
        """The row, copied into host memory."""
        length = int(self.lengths[slot])
        return Parked(take_row(self._cache, self._letters, slot, length), length, self._recent[slot].copy())

    def restore(self, slot: int, parked: Parked) -> None:
        """A row as it was, in any slot."""
        self._cache = put_row(self._cache, self._letters, slot, parked.row, placement=self._placement)
        self.lengths[slot], self._recent[slot] = parked.length, parked.recent_m

    def take_in(self, params: Params, given: Mapping[int, Sequence[int]]) -> None:
        """Computes these tokens behind what the rows of these slots hold: all of them, chunk after chunk."""
        left = {slot: list(tokens) for slot, tokens in given.items() if len(tokens)}
        while left:
            calls = [
                self._take_in_call(params, {slot: left[slot] for slot in group})
                for group in self.shapes.prefill_groups(
                    {slot: len(tokens) for slot, tokens in left.items()}, self._lengths_of(left)
                )
            ]
            for call, unsaved in _last_first(calls, self._run(calls)):
                self._keep(call, unsaved, call.fed)
            taken = {slot: tokens for call in calls for slot, tokens in call.fed.items()}
            left = {slot: rest for slot in left if (rest := left[slot][len(taken[slot]) :])}

    def write(self, params: Params, turns: Mapping[int, TurnSoFar]) -> dict[int, WrittenRow]:
        """Up to `decode_steps` tokens in each of these slots; short rows go together and do not read as far."""
        calls = [
            self._write_call(params, {slot: turns[slot] for slot in group}, rows)
            for group, rows in self.shapes.write_groups(self._lengths_of(turns))
        ]
        rows: dict[int, WrittenRow] = {}
        for call, (on_device, unsaved) in _last_first(calls, self._run(calls)):
            written = rows_of(jax.device_get(on_device), call)
            self._keep(call, unsaved, {slot: [turns[slot].last, *row.tokens[:-1]] for slot, row in written.items()})
            rows |= written
        return rows

    def _take_in_call(self, params: Params, left: Mapping[int, list[int]]) -> _Call:
        """A chunk for each of these slots, as long as the first of them needs."""
        slots = filled_up(list(left), bucket(len(left), self.shapes.prefill_rows), len(self.lengths))
        chunk = self.shapes.chunk(max(map(len, left.values())))
        attend_length = self.shapes.prefill_length(self._longest(left))
        fed = {slot: tokens[:chunk] for slot, tokens in left.items()}
        tokens_bt = np.array([_first(fed.get(slot, []), chunk) for slot in slots], np.int32)
        num_new_b = np.array([len(fed.get(slot, [])) for slot in slots], np.int32)
        function = functools.partial(
            take_in,
            self._model,
            params,
            self._for_programs(),
            np.array(slots, np.int32),
            tokens_bt,
            num_new_b,
            attend_length=attend_length,
        )
        return _Call(tuple(left), tuple(slots), fed, ("take_in", *tokens_bt.shape, attend_length), function)

    def _write_call(self, params: Params, turns: Mapping[int, TurnSoFar], rows: int) -> _Call:
        slots = filled_up(list(turns), rows, len(self.lengths))
        in_rows = [turns.get(slot, _SITS_OUT) for slot in slots]
        attend_length = self.shapes.write_length(self._longest(turns))
        draws = any(turn.temperature > 0 for turn in turns.values())
        function = functools.partial(
            write,
            self._model,
            params,
            self._for_programs(),
            self._slot_b(slots),
            Turns(
                last_b=np.array([turn.last for turn in in_rows], np.int32),
                key_bits_b2=np.array([turn.key_bits for turn in in_rows], np.uint32),
                index_b=np.array([turn.num_written for turn in in_rows], np.int32),
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
        return _Call(tuple(turns), tuple(slots), {}, ("write", len(slots), draws, attend_length), function)

    def _run(self, calls: Sequence[_Call]) -> list[Any]:
        """What the calls return, in their order; side by side where the machine gains by it."""
        if self._threads is None or len(calls) == 1:
            return [call.function() for call in calls]
        # Two threads that meet a new shape would both compile it.
        first = {call.shape: call for call in calls if call.shape not in self._compiled}
        done = {id(call): jax.block_until_ready(call.function()) for call in first.values()}
        self._compiled |= first.keys()
        rest = [call for call in calls if id(call) not in done]
        outcomes = self._threads.map(lambda call: jax.block_until_ready(call.function()), rest)
        done |= {id(call): outcome for call, outcome in zip(rest, outcomes, strict=True)}
        return [done[id(call)] for call in calls]

    def _keep(self, call: _Call, unsaved: Unsaved, fed: Mapping[int, list[int]]) -> None:
        """Puts what a call computed into the cache.

        Args:
            fed: slot -> the tokens that count.
        """
        self._cache = keep(self._for_programs(), self._slot_b(call.slots), unsaved, placement=self._placement)
        for slot, tokens in fed.items():
            self.lengths[slot] += len(tokens)
            self._recent[slot] = _last(self._recent[slot], tokens)

    def _for_programs(self) -> Cache:
        """The cache with lengths and last tokens as the host knows them now."""
        return self._cache._replace(length_b=self.lengths.copy(), recent_bm=self._recent.copy())

    def _slot_b(self, slots: Sequence[int]) -> np.ndarray | None:
        return np.array(slots, np.int32) if len(slots) < len(self.lengths) else None

    def _lengths_of(self, slots: Iterable[int]) -> dict[int, int]:
        return {slot: int(self.lengths[slot]) for slot in slots}

    def _longest(self, slots: Iterable[int]) -> int:
        return int(max(self.lengths[slot] for slot in slots))


def _last_first(calls: Sequence[_Call], outcomes: Sequence[Any]) -> Iterator[tuple[_Call, Any]]:
    """The order in which outcomes are kept: the last group may be filled up with slots of others."""
    return zip(reversed(calls), reversed(outcomes), strict=True)


def rows_of(written: Written, call: _Call) -> dict[int, WrittenRow]:
    """Slot -> its part of what a call wrote."""
    parts = {}
    for row, slot in enumerate(call.slots):
        if slot in call.group:
            count = int(written.count_b[row])
            tokens, logps = written.tokens_bj[row, :count].tolist(), written.logps_bj[row, :count].tolist()
            parts[slot] = WrittenRow(tokens, logps, bool(written.stopped_b[row]))
    return parts


def _first(tokens: Sequence[int], count: int) -> list[int]:
    return [*tokens, *[0] * (count - len(tokens))]


def _last(before_m: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """The last `m` ids when these tokens come behind those that were the last."""
    reach = len(before_m)
    known = np.concatenate([before_m, np.array(tokens[-reach:], np.int32)])
    return known[len(known) - reach :] if reach else before_m
