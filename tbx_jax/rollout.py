"""Rollout: attempts flow through slots; in each, the policy and the environment take turns until the episode
ends.

A slot of the environments keeps an episode from its first message to its last, and the sampler knows the episode by
that slot's number, so nothing is computed or rendered twice. There may be more of them than the sampler has slots: it
parks episodes that wait for their environment. As soon as a slot is free the next attempt starts in it: slow episodes
do not hold up the others. What the policy reads is appended to its tokens (`ChatTemplate`),
what it samples is kept as sampled (`TokenLedger`), and no text is ever tokenised again.
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
    """One attempt, as people and as the learner read it.

    Attributes:
        episode: its `usage` has `sampled_tokens` (the policy's) and `given_tokens` (prompt, results, user).
        trajectory: None when the episode is void.
    """

    episode: Episode
    trajectory: Trajectory | None


class Stopwatch:
    """Wall time by part.

    Attributes:
        seconds: name of the part -> time spent in it.
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
    """An episode in progress: its attempt, its tokens, the schemas of its tools, and how many turns were asked for."""

    attempt: Attempt
    ledger: TokenLedger = dataclasses.field(default_factory=TokenLedger)
    schemas: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_turns: int = 0

    def next_turn_key(self) -> tuple[str | int, ...]:
        """Names the randomness of the next turn: nothing of it depends on the slot or on the order of
        attempts.
        """
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
    """Makes every attempt and yields it when it ends; attempts are read only as slots become free.

    The order is a function of the attempts and of what is sampled, never of time. A turn cut off by a token
    limit ends its episode as truncated, and so does an answer that leaves no room for another token.

    Args:
        sampler: without episodes of its own; it may have fewer slots than `slots`.
        params: of the policy; the same until the last episode ended.
        slots: of environments.
        chat: of the policy's tokenizer.
        attempts: in the order in which they are started.
        max_episode_tokens: longest episode, prompt included.
        stopwatch: collects the seconds of `policy` (sampling and tokens) and `environment` (waited for tools,
            users and checks; what they do while the policy writes is not waited for).

    Raises:
        ConfigError: a task's prompt alone fills `max_episode_tokens`.
    """
    table = _Table(sampler, params, slots, chat, max_episode_tokens, stopwatch or Stopwatch())
    waiting = iter(attempts)
    try:
        yield from table.start(waiting)
        while table.live:
            actions = table.write()
            yield from table.answer()
            yield from table.start(waiting)
            table.step(actions)
    finally:  # also when the caller stops early: the slots must be free for the next run
        table.clear()


@dataclasses.dataclass
class _Table:
    """Who sits in which slot, and what moves them on.

    Environments step in a thread of their own while the sampler writes the turns that go on: a turn that ended is
    stepped during the next dispatch and its outcome taken after it, always, so that the order never depends on which
    of the two was faster. No other thread touches `slots` while a step runs.
    """

    sampler: Sampler
    params: Params
    slots: EpisodeSlots
    chat: ChatTemplate
    max_episode_tokens: int
    stopwatch: Stopwatch
    live: dict[int, _Live] = dataclasses.field(default_factory=dict)
    worker: ThreadPoolExecutor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(1, "tbx-environments"))
    stepping: Future[dict[int, SlotOutcome]] | None = None

    def start(self, waiting: Iterator[Attempt]) -> Iterator[Rollout]:
        """Fills free slots, half of all at most: episodes that begin together end their first turns together, and
        then the sampler would wait for environments that wait for it. Yields attempts that were void from the start.
        """
        free = [slot for slot in range(self.slots.num_slots) if slot not in self.live]
        for slot in free[: max(1, self.slots.num_slots // 2)]:
            while slot not in self.live and (attempt := next(waiting, None)) is not None:
                with self.stopwatch.running("environment"):
                    outcome = self.slots.start(slot, attempt.uid, attempt.seed)
                self.live[slot] = _Live(attempt)
                if outcome.ended:
                    yield self._finish(slot)
                    continue
                with self.stopwatch.running("policy"):
                    self._open(slot, outcome)

    def write(self) -> dict[int, str | Turn]:
        """One dispatch of the sampler; what the policy did in each slot whose turn ended."""
        with self.stopwatch.running("policy"):
            turns = self.sampler.advance(self.params) if self.sampler.busy else []
            return {turn.episode: self._action(turn) for turn in turns}

    def step(self, actions: Mapping[int, str | Turn]) -> None:
        """Let the environments of these slots step; `answer` takes what comes of it."""
        if actions:
            self.stepping = self.worker.submit(self.slots.advance, actions)

    def answer(self) -> Iterator[Rollout]:
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
        self.worker.shutdown()  # a step that runs is waited for
        for slot in self.live:
            self.sampler.free(slot)
        self.live.clear()

    def _open(self, slot: int, outcome: SlotOutcome) -> None:
        tools = self.slots.tools(slot)
        self.live[slot].schemas = schemas_of(tools)
        ids = self.chat.opening(outcome.messages, tools)
        if not self._give(slot, ids):
            raise ConfigError(
                f"the prompt of {self.live[slot].attempt.uid} has {len(ids)} tokens and an episode may have "
                f"{self.max_episode_tokens}: no room for a turn. Raise sampling.max_episode_tokens."
            )

    def _give(self, slot: int, ids: Sequence[int]) -> bool:
        """Appends tokens for the policy to read and asks for its next turn; False, and nothing done, without
        room.
        """
        live = self.live[slot]
        if len(live.ledger) + len(ids) >= self.max_episode_tokens:
            return False
        ask = self.sampler.extend if len(live.ledger) else self.sampler.begin
        ask(slot, ids, live.next_turn_key())
        live.ledger.give(ids)
        return True

    def _action(self, turn: SampledTurn) -> str | Turn:
        self.live[turn.episode].ledger.write(turn.tokens, turn.logps)
        text = self.chat.decode(turn.tokens)
        schemas = self.live[turn.episode].schemas
        return interpret(text, self.chat.chat_format, truncated=not turn.stopped, schemas=schemas)

    def _finish(self, slot: int) -> Rollout:
        """The record of the episode that ended in `slot`, which is free afterwards."""
        live = self.live.pop(slot)
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
