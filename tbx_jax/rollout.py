"""Rollout: each attempt runs in an environment slot, where policy and environment alternate until the episode ends.

An environment slot holds an episode from its first message to its last, and its number is the sampler's number of the
episode, so nothing is computed or rendered twice. There may be more environment slots than the sampler has cache rows:
it swaps out episodes that wait for their environment. As soon as an environment slot is free the next attempt starts
in it, so slow episodes do not delay the others. What the policy reads is appended to its tokens (`ChatTemplate`), what
it samples is kept as sampled (`TokenLedger`), and no text is ever tokenised again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tbx_envs.agents import Attempt
from tbx_envs.chat.interpretation import interpret, schemas_of
from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.episode import Episode, FinishReason
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Turn
from tbx_envs.vector import EpisodeSlots, SlotOutcome
from tbx_jax.models import Params
from tbx_jax.sampler.sampler import SampledTurn, Sampler
from tbx_jax.trajectory import Trajectory, trajectory_of


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A finished attempt: its record, and its tokens for the learner.

    Attributes:
        episode: record of the episode; `usage` has `sampled_tokens` (of the policy) and `given_tokens` (prompt, tool
            results, user).
        trajectory: tokens of the episode; None when it is void.
    """

    episode: Episode
    trajectory: Trajectory | None


class Stopwatch:
    """Wall time by part.

    Attributes:
        seconds: name of the part -> seconds spent in it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def running(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started


@dataclasses.dataclass
class _Live:
    """An episode in progress.

    Attributes:
        attempt: attempt that the episode is of.
        ledger: tokens so far.
        schemas: argument schema of each tool.
        num_turns: number of turns requested so far.
    """

    attempt: Attempt
    ledger: TokenLedger = dataclasses.field(default_factory=TokenLedger)
    schemas: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_turns: int = 0

    def next_turn_key(self) -> tuple[str | int, ...]:
        """The name of the next turn's randomness; independent of the slot and of the order of attempts."""
        self.num_turns += 1
        return (self.attempt.uid, self.attempt.index, self.attempt.seed, self.num_turns - 1)


def run_attempts(
    sampler: Sampler,
    params: Params,
    slots: EpisodeSlots,
    chat: ChatTemplate,
    attempts: Iterable[Attempt],
    *,
    max_episode_tokens: int,
    stopwatch: Stopwatch | None = None,
) -> Iterator[Rollout]:
    """Runs every attempt and yields it when it ends; attempts are read only as environment slots become free.

    The order is a function of the attempts and of the sampled tokens, never of time. A turn truncated by a token limit
    ends its episode as truncated, and so does an environment's answer that leaves no room for another token.

    Args:
        sampler: sampler without episodes; it may have fewer cache rows than `slots` has environments.
        params: parameters of the policy, the same for all attempts.
        slots: environment slots.
        chat: chat template of the policy's tokenizer.
        attempts: attempts in the order in which to start them.
        max_episode_tokens: token limit of an episode, prompt included.
        stopwatch: measures the seconds of `policy` (sampling and tokens) and `environment` (waiting for tools, users
            and checks, without the time in which the sampler is busy too).

    Raises:
        ConfigError: a task's prompt alone fills `max_episode_tokens`.
    """
    live = _LiveEpisodes(sampler, params, slots, chat, max_episode_tokens, stopwatch or Stopwatch())
    waiting = iter(attempts)
    try:
        yield from live.start(waiting)
        while live.episodes:
            actions = live.sample()
            yield from live.collect()
            yield from live.start(waiting)
            live.step(actions)
    finally:  # also when the caller stops early: the slots must be free for the next call
        live.clear()


@dataclasses.dataclass
class _LiveEpisodes:
    """The episodes in progress, by environment slot, and the phases that advance them.

    Environments step in a worker thread while the sampler decodes the other turns: an action is always stepped during
    the dispatch after the one that sampled it, and its outcome collected after that dispatch, so the order never
    depends on which of the two is faster. No other thread touches `slots` while a step runs.

    Attributes:
        sampler, params, slots, chat, max_episode_tokens, stopwatch: as in `run_attempts`.
        episodes: environment slot -> episode in progress.
        worker: thread in which environments step.
        stepping: outcomes of the running step; None when no step runs.
    """

    sampler: Sampler
    params: Params
    slots: EpisodeSlots
    chat: ChatTemplate
    max_episode_tokens: int
    stopwatch: Stopwatch
    episodes: dict[int, _Live] = dataclasses.field(default_factory=dict)
    worker: ThreadPoolExecutor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(1, "tbx-environments"))
    stepping: Future[dict[int, SlotOutcome]] | None = None

    def start(self, waiting: Iterator[Attempt]) -> Iterator[Rollout]:
        """Starts attempts in free environment slots; yields those that are void from the start.

        At most half of all slots at once: episodes that start together end their first turns together, and then the
        sampler and the environments would wait for each other.
        """
        free = [slot for slot in range(self.slots.num_slots) if slot not in self.episodes]
        for slot in free[: max(1, self.slots.num_slots // 2)]:
            while slot not in self.episodes and (attempt := next(waiting, None)) is not None:
                with self.stopwatch.running("environment"):
                    outcome = self.slots.start(slot, attempt.uid, attempt.seed)
                self.episodes[slot] = _Live(attempt)
                if outcome.ended:
                    yield self._finish(slot)
                    continue
                with self.stopwatch.running("policy"):
                    self._open(slot, outcome)

    def sample(self) -> dict[int, str | Turn]:
        """Runs one dispatch of the sampler; returns the policy's action in each slot whose turn ended."""
        with self.stopwatch.running("policy"):
            turns = self.sampler.advance(self.params) if self.sampler.busy else []
            return {turn.episode: self._action(turn) for turn in turns}

    def step(self, actions: Mapping[int, str | Turn]) -> None:
        """Starts a step of the environments in these slots; `collect` waits for its outcomes."""
        if actions:
            self.stepping = self.worker.submit(self.slots.advance, actions)

    def collect(self) -> Iterator[Rollout]:
        """Gives the policy the outcomes of the last `step`; yields the episodes that ended."""
        if self.stepping is None:
            return
        with self.stopwatch.running("environment"):
            outcomes = self.stepping.result()
        self.stepping = None
        for slot, outcome in outcomes.items():
            if not outcome.ended:
                with self.stopwatch.running("policy"):
                    fits = self._give(slot, self.chat.continuation(outcome.messages))
                if fits:
                    continue
                with self.stopwatch.running("environment"):
                    self.slots.advance({slot: Turn(truncated=True)})
            yield self._finish(slot)

    def clear(self) -> None:
        """Frees all slots of sampler and environments."""
        self.worker.shutdown()  # waits for a running step
        for slot in self.episodes:
            self.sampler.free(slot)
        self.episodes.clear()

    def _open(self, slot: int, outcome: SlotOutcome) -> None:
        tools = self.slots.tools(slot)
        self.episodes[slot].schemas = schemas_of(tools)
        ids = self.chat.opening(outcome.messages, tools)
        if not self._give(slot, ids):
            raise ConfigError(
                f"the prompt of {self.episodes[slot].attempt.uid} has {len(ids)} tokens and an episode may have "
                f"{self.max_episode_tokens}: no room for a turn. Raise sampling.max_episode_tokens."
            )

    def _give(self, slot: int, ids: Sequence[int]) -> bool:
        """Appends tokens for the policy to read and requests its next turn; False, and no effect, without room."""
        live = self.episodes[slot]
        if len(live.ledger) + len(ids) >= self.max_episode_tokens:
            return False
        request_turn = self.sampler.extend if len(live.ledger) else self.sampler.begin
        request_turn(slot, ids, live.next_turn_key())
        live.ledger.give(ids)
        return True

    def _action(self, turn: SampledTurn) -> str | Turn:
        live = self.episodes[turn.episode]
        live.ledger.write(turn.tokens, turn.logps)
        text = self.chat.decode(turn.tokens)
        return interpret(text, self.chat.chat_format, truncated=not turn.stopped, schemas=live.schemas)

    def _finish(self, slot: int) -> Rollout:
        """The record of the episode that ended in `slot`; frees the slot."""
        live = self.episodes.pop(slot)
        if len(live.ledger):
            self.sampler.free(slot)
        episode = self.slots.episode(slot, live.attempt.index)
        num_sampled = int(live.ledger.wrote.sum())
        counts = {"sampled_tokens": num_sampled, "given_tokens": len(live.ledger) - num_sampled}
        episode = dataclasses.replace(episode, usage={**episode.usage, **counts})
        if episode.reward is None:
            return Rollout(episode, None)
        trajectory = trajectory_of(
            live.ledger,
            uid=episode.uid,
            attempt=episode.attempt,
            reward=episode.reward,
            truncated=episode.finish_reason is FinishReason.TRUNCATED,
        )
        return Rollout(episode, trajectory)
