"""The sampler: turns of many episodes decoded together, each with a cache row that lives as long as the episode.

    sampler.begin(0, prompt, ("clinic/x/001", 0, 0))     # starts an episode and requests its first turn
    while sampler.busy:
        for turn in sampler.advance(params):             # turns that ended
            sampler.extend(turn.episode, answer, ("clinic/x/001", 0, 1))   # or sampler.free(turn.episode)

A slot is a row of the cache on the device. There may be more episodes than slots: an episode that requests a turn when
no slot is free gets the slot of an episode that waits for its environment, whose row is swapped out to host memory and
swapped in for its own next turn. The assignment of slots is a function of the calls alone, and no token depends on it.

`advance` assigns slots to episodes with a requested turn, prefills their given tokens (in chunks, episodes with
similar lengths together), then runs up to `decode_steps` decode steps in one dispatch. No token of an episode is
computed twice.

The invariant: of an episode's n tokens, given and sampled, the cache holds at most the first n - 1. The decode step
that samples the next token feeds the last one, so all tokens are sampled by the same code, and an end-of-turn token
enters the cache with the tokens of the next turn.

The host has each episode's tokens; keys and values (and a hybrid's states) are on the device. A sampled token depends
on (seed, turn key, index in the turn) and on the episode's tokens, not on its slot or on other episodes (other shapes
may round the last bit differently). Nothing here depends on time. A cache is valid only for the parameters that filled
it: change them between episodes only.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from tbx_envs.errors import ActionError, ConfigError
from tbx_jax.config import SamplingConfig
from tbx_jax.keys import key_bits
from tbx_jax.models import Model, Params
from tbx_jax.sampler.slot_cache import SlotCache, SwappedRow, TurnSoFar

TurnKey = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that ended.

    Attributes:
        episode: number of the episode.
        tokens: token ids as sampled, with the end-of-turn token when there is one.
        logps: log pi of each token, in nats at the sampling temperature.
        stopped: True when the policy wrote an end-of-turn token; False when a token limit truncated the turn, maybe
            before its first token.
    """

    episode: int
    tokens: list[int]
    logps: list[float]
    stopped: bool


@dataclasses.dataclass(slots=True)
class _Episode:
    """The host's record of an episode.

    Attributes:
        tokens: all token ids of the episode, given and sampled.
        slot: index of its cache row; None without one.
        swapped: its cache row in host memory; None unless it is swapped out.
        waiting: True from the request of a turn until `advance` returns the turn.
        since: number of the call that requested or returned its latest turn, for first come first served.
        key_bits: bits of the turn's random key.
        turn_start: index in `tokens` of the turn's first token.
        logps: log-probabilities of the turn's tokens so far.
        temperature: sampling temperature of the turn.
        max_turn_tokens: token limit of the turn.
    """

    tokens: list[int]
    slot: int | None = None
    swapped: SwappedRow | None = None
    waiting: bool = False
    since: int = 0
    key_bits: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.uint32))
    turn_start: int = 0
    logps: list[float] = dataclasses.field(default_factory=list)
    temperature: float = 1.0
    max_turn_tokens: int = 0


class Sampler:
    """Samples turns of many episodes, up to `sampling.slots` at a time.

    The caller numbers the episodes, with any integers.

    Args:
        model: model from `tbx_jax.models.build` or of a loaded policy.
        chat_end_ids: tokens that end a turn.
        sampling: temperature, limits, number of cache rows, steps per dispatch, type of the cache.
        seed: seed of the sampler; a turn's randomness is a function of it and of the turn's key.
        mesh: mesh of devices for parameters and cache; None is one device.
        rules: logical axis -> mesh axis, with `mesh`.
        params: parameters of the types that `advance` will get, for the memory plan; None is float32.

    Attributes:
        memory: memory plan of parameters and cache; logged once.

    Raises:
        ConfigError: an episode may become longer than the model allows, no token can end a turn, or the device does not
            have enough memory.
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
        params: Params | None = None,
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
        self._episodes: dict[int, _Episode] = {}
        self._slots: list[int | None] = [None] * sampling.slots
        self._calls = itertools.count()
        self._rows = SlotCache(model, sampling, sorted(chat_end_ids), mesh, rules or {}, params)
        self.memory = self._rows.memory
        logging.getLogger(__name__).info("%s", self.memory)

    @property
    def busy(self) -> bool:
        """True while `advance` has not returned every requested turn."""
        return any(episode.waiting for episode in self._episodes.values())

    @property
    def num_swapped_out(self) -> int:
        """Number of episodes whose cache row is in host memory."""
        return sum(episode.swapped is not None for episode in self._episodes.values())

    def begin(
        self,
        episode: int,
        tokens: Sequence[int],
        turn_key: TurnKey,
        *,
        temperature: float | None = None,
        max_turn_tokens: int | None = None,
    ) -> None:
        """Starts an episode with these ids, and requests its first turn.

        Args:
            episode: number of the episode; an episode of that number without a requested turn is dropped.
            tokens: token ids of the prompt, at least one.
            turn_key: name of the turn's randomness, for example (uid, attempt, turn).
            temperature: sampling temperature of this turn; None is the configured one.
            max_turn_tokens: token limit of this turn; None, or more than the configured limit, is the configured one.

        Raises:
            ActionError: the episode has a requested turn, or the vocabulary does not have the tokens.
        """
        self._refuse_waiting(episode)
        given = self._given(episode, tokens)
        self.free(episode)
        self._episodes[episode] = _Episode(given)
        self._ask(episode, turn_key, temperature, max_turn_tokens)

    def extend(
        self,
        episode: int,
        tokens: Sequence[int],
        turn_key: TurnKey,
        *,
        temperature: float | None = None,
        max_turn_tokens: int | None = None,
    ) -> None:
        """Appends ids to an episode and requests its next turn; arguments as in `begin`. Cached tokens are reused.

        Raises:
            ActionError: no such episode, or as in `begin`.
        """
        if episode not in self._episodes:
            raise ActionError(f"there is no episode {episode} to extend; call begin({episode}, ...)")
        self._refuse_waiting(episode)
        self._episodes[episode].tokens += self._given(episode, tokens)
        self._ask(episode, turn_key, temperature, max_turn_tokens)

    def resume(
        self,
        episode: int,
        tokens: Sequence[int],
        turn_key: TurnKey,
        *,
        temperature: float | None = None,
        max_turn_tokens: int | None = None,
    ) -> int:
        """Like `begin` with the tokens of the whole episode, but reuses the cached part of their beginning.

        Returns:
            Number of tokens that are reused (`num_reusable`).

        Raises:
            ActionError: as in `extend`.
        """
        if episode not in self._episodes:
            raise ActionError(f"there is no episode {episode} to resume; call begin({episode}, ...)")
        self._refuse_waiting(episode)
        known, given = self._episodes[episode], self._given(episode, tokens)
        reused = self.num_reusable(episode, given)
        if known.slot is not None:
            self._rows.truncate(known.slot, given[:reused])
        elif known.swapped is not None:
            known.swapped = known.swapped.truncated(given[:reused]) if reused else None
        known.tokens = given
        self._ask(episode, turn_key, temperature, max_turn_tokens)
        return reused

    def num_reusable(self, episode: int, tokens: Sequence[int]) -> int:
        """Number of these tokens that `resume` would reuse; 0 for an unknown episode.

        A hybrid's state cannot be truncated: all cached tokens of the episode are reused, or none.
        """
        known = self._episodes.get(episode)
        if known is None:
            return 0
        cached = (
            int(self._rows.lengths[known.slot])
            if known.slot is not None
            else known.swapped.length
            if known.swapped
            else 0
        )
        common = min(cached, num_common(known.tokens, tokens), len(tokens) - 1)
        return common if common == cached or not self._model.config.hybrid else 0

    def sampled_so_far(self, episode: int) -> list[int]:
        """Token ids of the episode's turn so far; empty for an unknown episode."""
        known = self._episodes.get(episode)
        return known.tokens[known.turn_start :] if known is not None else []

    def end_turn(self, episode: int) -> SampledTurn:
        """Ends a requested turn early, as truncated; `advance` will not return it.

        Raises:
            ActionError: the episode has no requested turn.
        """
        known = self._episodes.get(episode)
        if known is None or not known.waiting:
            raise ActionError(f"episode {episode} has no turn in progress to end; request one with begin or extend")
        return self._finish(episode, stopped=False)

    def free(self, episode: int) -> None:
        """Drops an episode, even in the middle of a turn; an unknown one is ignored."""
        dropped = self._episodes.pop(episode, None)
        if dropped is not None and dropped.slot is not None:
            self._slots[dropped.slot] = None

    def advance(self, params: Params) -> list[SampledTurn]:
        """Prefills given tokens, and samples up to `decode_steps` tokens in every waiting episode that has a slot.

        Returns:
            The turns that ended, by episode; often none. The next call for their episodes is `extend`, `begin`,
            `resume` or `free`.
        """
        waiting = [number for number, episode in self._episodes.items() if episode.waiting]
        turns = [self._finish(number, stopped=False) for number in waiting if self._num_left(number) == 0]
        self._assign_slots()
        self._prefill(params)
        turns = sorted([*turns, *self._decode(params)], key=lambda turn: turn.episode)
        for turn in turns:  # numbered in an order that does not depend on which turns were computed together
            self._episodes[turn.episode].since = next(self._calls)
        return turns

    # --- requests -------------------------------------------------------------------------------------------

    def _refuse_waiting(self, number: int) -> None:
        episode = self._episodes.get(number)
        if episode is not None and episode.waiting:
            raise ActionError(
                f"episode {number} waits for a turn; call advance() until it is returned, or free({number})"
            )

    def _given(self, number: int, tokens: Sequence[int]) -> list[int]:
        given = [int(token) for token in tokens]
        if not given or not all(0 <= token < self._model.vocabulary for token in given):
            raise ActionError(
                f"episode {number}: {len(given)} tokens, from {min(given, default=None)} to {max(given, default=None)}"
                f", for a vocabulary of {self._model.vocabulary}; give at least one id, all of this model's tokenizer"
            )
        return given

    def _ask(self, number: int, turn_key: TurnKey, temperature: float | None, max_turn_tokens: int | None) -> None:
        episode, sampling = self._episodes[number], self._sampling
        episode.waiting, episode.since = True, next(self._calls)
        episode.key_bits = key_bits(self._seed, "turn", *turn_key)
        episode.turn_start, episode.logps = len(episode.tokens), []
        episode.temperature = sampling.temperature if temperature is None else temperature
        episode.max_turn_tokens = min(sampling.max_turn_tokens, max_turn_tokens or sampling.max_turn_tokens)

    def _num_left(self, number: int) -> int:
        """Number of tokens that the episode's turn may still have."""
        episode = self._episodes[number]
        in_turn = episode.max_turn_tokens - len(episode.logps)
        return max(0, min(in_turn, self._sampling.max_episode_tokens - len(episode.tokens)))

    def _finish(self, number: int, *, stopped: bool) -> SampledTurn:
        episode = self._episodes[number]
        episode.waiting, episode.since = False, next(self._calls)
        return SampledTurn(number, episode.tokens[episode.turn_start :], episode.logps, stopped)

    # --- slots ----------------------------------------------------------------------------------------------

    def _assign_slots(self) -> None:
        """Assigns slots to episodes that wait for a turn, in the order of their requests, until none is left."""
        waiting = [number for number, episode in self._episodes.items() if episode.waiting and episode.slot is None]
        for number in sorted(waiting, key=lambda number: self._episodes[number].since):
            slot = self._slot_for(number)
            if slot is None:
                return
            episode = self._episodes[number]
            self._slots[slot], episode.slot = number, slot
            if episode.swapped is None:
                self._rows.clear(slot)
            else:
                self._rows.swap_in(slot, episode.swapped)
                episode.swapped = None

    def _slot_for(self, number: int) -> int | None:
        """A free slot, that of its own number if possible, else that of the episode that was idle for longest."""
        occupied = {slot: owner for slot, owner in enumerate(self._slots) if owner is not None}
        free = [slot for slot in range(len(self._slots)) if slot not in occupied]
        if free:
            return number if number in free else free[0]
        idle = [slot for slot, owner in occupied.items() if not self._episodes[owner].waiting]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: self._episodes[occupied[slot]].since)
        self._swap_out(slot, self._episodes[occupied[slot]])
        return slot

    def _swap_out(self, slot: int, episode: _Episode) -> None:
        episode.swapped = self._rows.swap_out(slot) if self._rows.lengths[slot] else None
        self._slots[slot], episode.slot = None, None

    def _active(self) -> dict[int, int]:
        """Slot -> number of the episode in it, for episodes that wait for a turn."""
        return {
            slot: number
            for slot, number in enumerate(self._slots)
            if number is not None and self._episodes[number].waiting
        }

    # --- programs -------------------------------------------------------------------------------------------

    def _prefill(self, params: Params) -> None:
        """Computes given tokens until each active episode has one token left for the decode step to feed."""
        tokens = {slot: self._episodes[number].tokens for slot, number in self._active().items()}
        self._rows.prefill(params, {slot: ids[self._rows.lengths[slot] : -1] for slot, ids in tokens.items()})

    def _decode(self, params: Params) -> list[SampledTurn]:
        """One dispatch of decode steps for each group of active episodes."""
        active = self._active()
        turns = {}
        for slot, number in active.items():
            episode = self._episodes[number]
            turns[slot] = TurnSoFar(
                last=episode.tokens[-1],
                key_bits=episode.key_bits,
                num_sampled=len(episode.logps),
                num_left=self._num_left(number),
                temperature=episode.temperature,
            )
        ended = []
        for slot, row in self._rows.decode(params, turns).items():
            number = active[slot]
            episode = self._episodes[number]
            episode.tokens += row.tokens
            episode.logps += row.logps
            if row.stopped or self._num_left(number) == 0:
                ended.append(self._finish(number, stopped=row.stopped))
        return ended


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
