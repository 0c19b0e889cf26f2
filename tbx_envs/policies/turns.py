"""Agents that take one turn after the other, played one episode at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tbx_envs.domains import ScriptedAgent
from tbx_envs.episode import Episode, Fault
from tbx_envs.errors import PolicyFault
from tbx_envs.messages import Message
from tbx_envs.policies import Attempt
from tbx_envs.task import Task
from tbx_envs.task_lists import find_task
from tbx_envs.vector import EpisodeSlots

# Makes the agent of one attempt.
AgentMaker = Callable[[Task, Attempt], ScriptedAgent]


def play_turns(attempts: Iterable[Attempt], make_agent: AgentMaker) -> Iterator[Episode]:
    """One episode for each attempt, in order, played by the agent that `make_agent` makes for it.

    An agent that raises, or that has nothing left to say before the episode's end, has failed: the episode
    is void with a fault of kind `policy`.

    Raises:
        DomainError: no such task, or one whose expected calls fail.
    """
    slots = EpisodeSlots(1)
    try:
        for attempt in attempts:
            yield _play_one(slots, attempt, make_agent)
    finally:
        slots.close()


def _play_one(slots: EpisodeSlots, attempt: Attempt, make_agent: AgentMaker) -> Episode:
    outcome = slots.start(0, attempt.uid, attempt.seed)
    task = find_task(attempt.uid)
    try:
        agent = _guarded(lambda: make_agent(task, attempt), attempt)
        answers: tuple[Message, ...] | None = None  # what starts a generator
        while not outcome.ended:
            turn = _guarded(functools.partial(agent.send, answers), attempt)
            outcome = slots.advance({0: turn})[0]
            answers = outcome.messages
    except PolicyFault as fault:
        return _void(slots, attempt, fault)
    return slots.episode(0, attempt.attempt)


T = TypeVar("T")


def _guarded(step: Callable[[], T], attempt: Attempt) -> T:
    try:
        return step()
    except StopIteration:
        raise PolicyFault(
            f"task {attempt.uid}: the agent had no turn left, and the episode goes on. Let its last turn end with "
            f"<DONE>."
        ) from None
    except Exception as error:  # the episode boundary: whatever an agent raises voids the episode
        raise PolicyFault(
            f"task {attempt.uid}: the agent raised {type(error).__name__}: {error}. The episode is void; fix the agent."
        ) from error


def _void(slots: EpisodeSlots, attempt: Attempt, fault: PolicyFault) -> Episode:
    return Episode(
        uid=attempt.uid,
        attempt=attempt.attempt,
        seed=attempt.seed,
        transcript=slots.env(0).transcript,
        finish_reason=None,
        report=None,
        reward=None,
        fault=Fault(fault.kind, str(fault)),
        seconds={},
        usage={},
    )
