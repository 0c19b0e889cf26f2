"""Agents that take one turn after the other: each attempt is played by an agent of its own, several at once if
asked."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from tbx_envs.agents import Attempt, Opening
from tbx_envs.domains import AgentTurns
from tbx_envs.episode import Episode
from tbx_envs.errors import PolicyFault
from tbx_envs.messages import Message
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.vector import EpisodeSlots

# Makes the agent of one attempt, which has begun with that opening.
AgentMaker = Callable[[Attempt, Opening], AgentTurns]


def play_turns(
    attempts: Iterable[Attempt],
    make_agent: AgentMaker,
    *,
    concurrency: int = 1,
    stop: threading.Event | None = None,
    options: EpisodeOptions | None = None,
) -> Generator[Episode, None, None]:
    """One episode for each attempt, played by the agent that `make_agent` makes for it.

    An agent that raises, or that has nothing left to say before the episode's end, has failed: the episode
    is void with a fault of kind `policy`.

    Args:
        concurrency: how many episodes run at the same time, each in a thread. Worth it where an episode waits for
            other processes or for a network. With 1 the episodes come in order, else as they end.
        stop: set when the caller stops early or is interrupted, so that agents that wait for something can let go.
            Episodes that run end with the turn they are in.
        options: how every episode is set up; None is the defaults.

    Raises:
        DomainError: no such task, or one whose expected calls fail.
    """
    stop = stop or threading.Event()
    if concurrency == 1:
        slots = EpisodeSlots(1, options)
        try:
            for attempt in attempts:
                yield _play_one(slots, attempt, make_agent, stop)
        finally:
            slots.close()
    else:
        yield from _play_many(attempts, make_agent, concurrency, stop, options)


def _play_many(
    attempts: Iterable[Attempt],
    make_agent: AgentMaker,
    concurrency: int,
    stop: threading.Event,
    options: EpisodeOptions | None,
) -> Iterator[Episode]:
    """The episodes as they end. When the caller stops early, those that run are waited for and dropped."""
    idle = deque(EpisodeSlots(1, options) for _ in range(concurrency))
    waiting = iter(attempts)
    running: dict[Future[Episode], EpisodeSlots] = {}
    with ThreadPoolExecutor(concurrency, "tbx-episodes") as threads:
        try:
            while True:
                while idle and (attempt := next(waiting, None)) is not None:
                    slots = idle.popleft()
                    running[threads.submit(_play_one, slots, attempt, make_agent, stop)] = slots
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    idle.append(running.pop(future))
                    yield future.result()
        finally:
            stop.set()
            wait(running)
            for slots in (*idle, *running.values()):
                slots.close()


def _play_one(slots: EpisodeSlots, attempt: Attempt, make_agent: AgentMaker, stop: threading.Event) -> Episode:
    outcome = slots.start(0, attempt.uid, attempt.seed)
    if outcome.ended:
        return slots.episode(0, attempt.index)
    opening = Opening(slots.env(0).task, outcome.messages, slots.tools(0))
    try:
        agent = _guarded(lambda: make_agent(attempt, opening), attempt)
        answers: tuple[Message, ...] | None = None  # what starts a generator
        while not outcome.ended:
            if stop.is_set():
                raise PolicyFault(f"task {attempt.uid}: given up between two turns, since the run stops.")
            turn = _guarded(functools.partial(agent.send, answers), attempt)
            outcome = slots.advance({0: turn})[0]
            answers = outcome.messages
    except PolicyFault as fault:
        return slots.abandon(0, attempt.index, fault)
    return slots.episode(0, attempt.index)


T = TypeVar("T")


def _guarded(step: Callable[[], T], attempt: Attempt) -> T:
    try:
        return step()
    except StopIteration:
        raise PolicyFault(
            f"task {attempt.uid}: the agent had no turn left, and the episode goes on. Let its last turn end with "
            f"<DONE>."
        ) from None
    except PolicyFault:
        raise
    except Exception as error:  # the episode boundary: whatever an agent raises voids the episode
        raise PolicyFault(
            f"task {attempt.uid}: the agent raised {type(error).__name__}: {error}. The episode is void; fix the agent."
        ) from error
