"""The sampler: many episodes written together, each with a cache that lives as long as the episode.

    sampler.begin(0, prompt, ("clinic/x/001", 0, 0))     # a fresh episode; asks for its first turn
    while sampler.busy:
        for turn in sampler.advance(params):             # turns that ended
            sampler.extend(turn.episode, answer, ("clinic/x/001", 0, 1))   # or sampler.free(turn.episode)

Episodes sit in slots, the rows of the cache on the device. There may be more episodes than slots: one that waits for
its next turn and finds none free takes the slot of one that waits for its environment, whose row is parked in host
memory until its own next turn. Who sits where is a function of the calls alone, and no token depends on it.

`advance` gives slots to those that ask, takes in the given tokens of every seated one (chunked prefill, episodes of
like need together), then runs up to `decode_steps` decode steps in one dispatch. Nothing is computed twice over an
episode's turns.

The invariant: of an episode's n tokens, given and sampled, the cache holds the first n - 1 or fewer. The last one is
fed by the decode step that samples the next, so every sampled token comes out of the same code, and an end-of-turn
token enters the cache with the tokens of the next turn.

The host knows each episode's tokens; only keys and values (and a hybrid's states) live on the device. A token depends
on (seed, turn key, its index in the turn) and on the episode's tokens, not on its slot or its neighbours (other shapes
may round otherwise in the last bit). Nothing here looks at a clock. A cache belongs to the parameters that filled it:
change them between episodes only.
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
from tbx_jax.sampler.slot_cache import Parked, SlotCache, TurnSoFar

TurnKey = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that ended.

    Attributes:
        episode: whose.
        tokens: ids as sampled, the end-of-turn token included when there is one.
        logps: log pi of each, in nats at the sampling temperature.
        stopped: True when the policy wrote an end-of-turn token; False when a token limit cut the turn off, maybe
            before its first token.
    """

    episode: int
    tokens: list[int]
    logps: list[float]
    stopped: bool


@dataclasses.dataclass(slots=True)
class _Episode:
    """What the host knows about an episode.

    Attributes:
        tokens: of the whole episode, given and sampled.
        slot: where it sits, or None.
        parked: its row in host memory, or None.
        waiting: True while a turn is asked for and has not been returned.
        since: number of the call that made it wait, or that returned its turn: who was first.
        key_bits: of the turn's key.
        turn_start: place in `tokens` of the turn's first token.
        logps: of the turn's tokens so far.
        temperature: of the turn.
        max_turn_tokens: of the turn.
    """

    tokens: list[int]
    slot: int | None = None
    parked: Parked | None = None
    waiting: bool = False
    since: int = 0
    key_bits: np.ndarray | None = None
    turn_start: int = 0
    logps: list[float] = dataclasses.field(default_factory=list)
    temperature: float = 1.0
    max_turn_tokens: int = 0


class Sampler:
    """Writes turns for many episodes, up to `sampling.slots` at a time.

    An episode is named by any integer that its caller likes.

    Args:
        model: from `tbx_jax.models.build` or a loaded policy.
        chat_end_ids: tokens that end a turn.
        sampling: temperature, limits, slots, steps per dispatch, type of the cache.
        seed: of the run; a turn's randomness is a function of it and of the turn's key.
        mesh: where parameters and cache live; None is one device.
        rules: axis letter -> mesh axis, with `mesh`.
        params: such as `advance` will get them, for the reckoning of memory; None is float32.

    Attributes:
        memory: what was reckoned for parameters and cache; said once in the log.

    Raises:
        ConfigError: an episode may become longer than the model allows, nothing can end a turn, or the device has not
            enough memory.
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
        self._seats: list[int | None] = [None] * sampling.slots
        self._calls = itertools.count()
        self._rows = SlotCache(model, sampling, sorted(chat_end_ids), mesh, rules or {}, params)
        self.memory = self._rows.memory
        logging.getLogger(__name__).info("%s", self.memory)

    @property
    def busy(self) -> bool:
        """True while a turn is asked for that `advance` has not returned."""
        return any(episode.waiting for episode in self._episodes.values())

    @property
    def num_parked(self) -> int:
        """Episodes whose row is in host memory."""
        return sum(episode.parked is not None for episode in self._episodes.values())

    def begin(
        self,
        episode: int,
        tokens: Sequence[int],
        turn_key: TurnKey,
        *,
        temperature: float | None = None,
        max_turn_tokens: int | None = None,
    ) -> None:
        """Starts a fresh episode with these ids, and asks for its first turn.

        Args:
            episode: its number; an episode of that number that does not wait for a turn is dropped.
            tokens: the prompt, at least one id.
            turn_key: names the turn's randomness, for example (uid, attempt, turn).
            temperature: of this turn; None is the configured one.
            max_turn_tokens: of this turn; None, or more than is configured, is the configured limit.

        Raises:
            ActionError: an episode that waits for a turn, or tokens the model does not have.
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
        """Appends ids to an episode and asks for its next turn; what the cache holds is not computed again.

        Raises:
            ActionError: no such episode or one that waits for a turn, or tokens the model does not have.
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
        """Like `begin` with the tokens of the whole episode, but keeps what the cache holds of their beginning.

        Returns:
            How many tokens are not computed again (`num_reusable`).

        Raises:
            ActionError: as `extend`.
        """
        if episode not in self._episodes:
            raise ActionError(f"there is no episode {episode} to resume; call begin({episode}, ...)")
        self._refuse_waiting(episode)
        known, given = self._episodes[episode], self._given(episode, tokens)
        reused = self.num_reusable(episode, given)
        if known.slot is not None:
            self._rows.cut(known.slot, given[:reused])
        elif known.parked is not None:
            known.parked = known.parked.cut(given[:reused]) if reused else None
        known.tokens = given
        self._ask(episode, turn_key, temperature, max_turn_tokens)
        return reused

    def num_reusable(self, episode: int, tokens: Sequence[int]) -> int:
        """How many of these tokens `resume` would find computed; 0 for an episode that is not there.

        A hybrid's state cannot go back: it is all that the episode holds, or nothing.
        """
        known = self._episodes.get(episode)
        if known is None:
            return 0
        cached = (
            int(self._rows.lengths[known.slot])
            if known.slot is not None
            else known.parked.length
            if known.parked
            else 0
        )
        common = min(cached, num_common(known.tokens, tokens), len(tokens) - 1)
        return common if common == cached or not self._model.config.hybrid else 0

    def written(self, episode: int) -> list[int]:
        """What the episode's turn has so far; empty for an episode that is not there."""
        known = self._episodes.get(episode)
        return known.tokens[known.turn_start :] if known is not None else []

    def end_turn(self, episode: int) -> SampledTurn:
        """Ends a turn that is asked for where it stands, as cut off; `advance` will not return it.

        Raises:
            ActionError: the episode does not wait for a turn.
        """
        known = self._episodes.get(episode)
        if known is None or not known.waiting:
            raise ActionError(f"episode {episode} waits for no turn that could be ended")
        return self._finish(episode, stopped=False)

    def free(self, episode: int) -> None:
        """Drops an episode, also in the middle of a turn; one that is not there is no error."""
        dropped = self._episodes.pop(episode, None)
        if dropped is not None and dropped.slot is not None:
            self._seats[dropped.slot] = None

    def advance(self, params: Params) -> list[SampledTurn]:
        """Takes in what was given, writes up to `decode_steps` tokens in every waiting episode that has a slot.

        Returns:
            The turns that ended, by episode; often none. Their episodes wait for `extend`, `begin`, `resume` or `free`.
        """
        waiting = [number for number, episode in self._episodes.items() if episode.waiting]
        turns = [self._finish(number, stopped=False) for number in waiting if self._num_left(number) == 0]
        self._seat_waiting()
        self._prefill(params)
        turns = sorted([*turns, *self._decode(params)], key=lambda turn: turn.episode)
        for turn in turns:  # in an order that does not depend on which of them were computed together
            self._episodes[turn.episode].since = next(self._calls)
        return turns

    # --- what is asked for ----------------------------------------------------------------------------------

    def _refuse_waiting(self, number: int) -> None:
        episode = self._episodes.get(number)
        if episode is not None and episode.waiting:
            raise ActionError(f"episode {number} waits for a turn; call advance() until it returns, or free({number})")

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
        """How many tokens the episode's turn may still have."""
        episode = self._episodes[number]
        in_turn = episode.max_turn_tokens - len(episode.logps)
        return max(0, min(in_turn, self._sampling.max_episode_tokens - len(episode.tokens)))

    def _finish(self, number: int, *, stopped: bool) -> SampledTurn:
        episode = self._episodes[number]
        episode.waiting, episode.since = False, next(self._calls)
        return SampledTurn(number, episode.tokens[episode.turn_start :], episode.logps, stopped)

    # --- who sits where -------------------------------------------------------------------------------------

    def _seat_waiting(self) -> None:
        """Slots for episodes that wait for a turn, in the order in which they asked, as long as there are any."""
        standing = [number for number, episode in self._episodes.items() if episode.waiting and episode.slot is None]
        for number in sorted(standing, key=lambda number: self._episodes[number].since):
            slot = self._slot_for(number)
            if slot is None:
                return
            episode = self._episodes[number]
            self._seats[slot], episode.slot = number, slot
            if episode.parked is None:
                self._rows.empty(slot)
            else:
                self._rows.restore(slot, episode.parked)
                episode.parked = None

    def _slot_for(self, number: int) -> int | None:
        """A free slot, that of its own number if possible, or that of the episode which was idle for longest."""
        free = [slot for slot, seated in enumerate(self._seats) if seated is None]
        if free:
            return number if number in free else free[0]
        idle = [seated for seated in self._seats if not self._episodes[seated].waiting]
        if not idle:
            return None
        first = min(idle, key=lambda seated: self._episodes[seated].since)
        slot = self._episodes[first].slot
        self._park(first)
        return slot

    def _park(self, number: int) -> None:
        episode = self._episodes[number]
        episode.parked = self._rows.park(episode.slot) if self._rows.lengths[episode.slot] else None
        self._seats[episode.slot], episode.slot = None, None

    def _seated(self) -> list[int]:
        """Slots of episodes that wait for a turn."""
        return [
            slot for slot, number in enumerate(self._seats) if number is not None and self._episodes[number].waiting
        ]

    def _in(self, slot: int) -> _Episode:
        return self._episodes[self._seats[slot]]

    # --- what is computed -----------------------------------------------------------------------------------

    def _prefill(self, params: Params) -> None:
        """Computes given tokens until each seated episode has one token left for the decode step to feed."""
        seated = {slot: self._in(slot).tokens for slot in self._seated()}
        self._rows.take_in(params, {slot: tokens[self._rows.lengths[slot] : -1] for slot, tokens in seated.items()})

    def _decode(self, params: Params) -> list[SampledTurn]:
        """One dispatch of decode steps for each group of seated episodes that wait."""
        turns = {}
        for slot in self._seated():
            episode = self._in(slot)
            turns[slot] = TurnSoFar(
                last=episode.tokens[-1],
                key_bits=episode.key_bits,
                num_written=len(episode.logps),
                num_left=self._num_left(self._seats[slot]),
                temperature=episode.temperature,
            )
        ended = []
        for slot, row in self._rows.write(params, turns).items():
            number, episode = self._seats[slot], self._in(slot)
            episode.tokens += row.tokens
            episode.logps += row.logps
            if row.stopped or self._num_left(number) == 0:
                ended.append(self._finish(number, stopped=row.stopped))
        return ended


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
