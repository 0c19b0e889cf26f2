"""Who acts in an evaluation.

A `Agent` plays attempts and gives back one episode for each, in any order. The agents of this package are
agents that take one turn after the other (`play_turns`): `oracle`, `idle`, `scripted`. A agent of a policy
model runs many episodes together instead (`tbx_jax.commands.agents`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from tbx_envs.episode import Episode
from tbx_envs.messages import Message
from tbx_envs.task import AnyTask


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a task, to be made.

    Attributes:
        uid: of the task.
        index: number of the attempt at this task, from 0.
        seed: of everything random in the episode: the user's wording, and what the policy draws.
    """

    uid: str
    index: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What an agent finds when its episode begins.

    Attributes:
        task: the whole task; only agents that know the answer look at it.
        messages: said so far: the rules first, the user's first message last.
        tools: of the episode, as OpenAI-function style dictionaries.
    """

    task: AnyTask
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]]


@runtime_checkable
class Agent(Protocol):
    """Plays attempts."""

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in any order, void ones too: a fault of one attempt never stops the
        others."""
        ...
