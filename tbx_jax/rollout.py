"""Rollout: attempts flow through slots; in each, the policy and the environment take turns until the episode ends.

A slot of the sampler and a slot of the environments belong together and keep an episode from its first token to its
last, so nothing is computed or rendered twice. As soon as a slot is free the next attempt starts in it: slow episodes
do not hold up the others. What the policy reads is appended to its tokens (`ChatTemplate`), what it samples is kept as
sampled (`TokenLedger`), and no text is ever tokenised again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tbx_envs.chat.interpretation import interpret
from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.episode import Episode, FinishReason
from tbx_envs.messages import Turn
from tbx_envs.policies import Attempt
from tbx_envs.vector import EpisodeSlots, SlotOutcome
from tbx_jax.models import Params
from tbx_jax.sampler import SampledTurn, Sampler
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
    """An episode in progress: its attempt, its tokens, and how many turns were asked for."""

    attempt: Attempt
    ledger: TokenLedger = dataclasses.field(default_factory=TokenLedger)
    num_turns: int = 0

    def next_turn_key(self) -> tuple[str | int, ...]:
        """Names the randomness of the next turn: nothing of it depends on the slot or on the order of attempts."""
        self.num_turns += 1
        return (self.attempt.uid, self.attempt.attempt, self.attempt.seed, self.num_turns - 1)
