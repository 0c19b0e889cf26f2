"""Agents: what acts in an evaluation.

An `Agent` runs attempts and returns one episode for each, in any order. The agents of this package take one turn after
the other (`play_turns`): `oracle`, `idle`, `scripted`, and `endpoint`, a served model. The agent of a policy's weights
runs many episodes together instead (`tbx_jax.commands.agents`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from tbx_envs.episode import Episode
from tbx_envs.messages import Message
from tbx_envs.task import AnyTask


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a task that an agent is to make.

    Attributes:
        uid: task id.
        index: number of the attempt at this task, from 0.
        seed: seed of everything random in the episode: the user's wording and the agent's samples.
    """

    uid: str
    index: int
    seed: int

    @property
    def attempt(self) -> int:
        """The name of `index` in tbx 0.1, until version 0.3."""
        warnings.warn("attempt.attempt is now called attempt.index.", DeprecationWarning, stacklevel=2)
        return self.index


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What an agent is given at the start of its episode.

    Attributes:
        task: whole task; only agents that are meant to know the solution read it.
        messages: messages so far, the rules first and the user's first message last.
        tools: tools of the episode, as OpenAI-function style dictionaries.
    """

    task: AnyTask
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]]


@runtime_checkable
class Agent(Protocol):
    """Runs attempts."""

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in any order, including void ones: a fault in one attempt does not stop the
        others."""
        ...
