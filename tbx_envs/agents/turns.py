"""Episodes of agents that are generators: an attempt has an agent of its own, which yields one turn after the other.

Several episodes can run at the same time, each in a thread.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tbx_envs.agents import Attempt, Opening
from tbx_envs.domains import AgentTurns
from tbx_envs.doors import shown, words_of
from tbx_envs.episode import Episode
from tbx_envs.errors import ConfigError, PolicyFault
from tbx_envs.messages import Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.tools.given_turn import action_problem
from tbx_envs.vector import EpisodeSlots

# (attempt, opening) -> agent of that attempt, whose episode has started with the opening.
AgentMaker = Callable[[Attempt, Opening], AgentTurns]


def play_turns(
    attempts: Iterable[Attempt],
    make_agent: AgentMaker,
    *,
    concurrency: int = 1,
    stop: threading.Event | None = None,
    options: EpisodeOptions | None = None,
) -> Generator[Episode, None, None]:
    """One episode for each attempt, with the agent that `make_agent` makes for it.

    An agent that raises, or that returns before the episode's end, has failed: the episode is void with a fault of kind
    `policy`.

    Args:
        attempts: attempts to make.
        make_agent: maker of the agent of each attempt.
        concurrency: number of episodes that run at the same time, each in a thread. More than 1 pays off where an
            episode waits for other processes or for a network. With 1 the episodes are yielded in order, otherwise as
            they end.
        stop: event that is set when the caller stops early or is interrupted, so that waiting agents can return.
            Running episodes end after their current turn.
        options: options of every episode; None is the defaults.

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
    """The episodes as they end. When the caller stops early, the running ones are awaited and dropped."""
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
        next_turn = functools.partial(next, agent)
        while not outcome.ended:
            if stop.is_set():
                raise PolicyFault(f"task {attempt.uid}: stopped between two turns, since the run is being stopped.")
            outcome = slots.advance({0: _usable(_guarded(next_turn, attempt), attempt)})[0]
            next_turn = functools.partial(agent.send, outcome.messages)
    except PolicyFault as fault:
        return slots.abandon(0, attempt.index, fault)
    return slots.episode(0, attempt.index)


def _usable(action: Any, attempt: Attempt) -> str | Turn:
    """What an agent yielded; one that yields no turn has failed, which ends its own episode and no other."""
    if (problem := action_problem(action)) is not None:
        raise PolicyFault(f"task {attempt.uid}: what the agent yielded is {problem} ({shown(action)}). Fix the agent.")
    assert isinstance(action, str | Turn)  # otherwise there is a problem
    return action


T = TypeVar("T")


def _guarded(step: Callable[[], T], attempt: Attempt) -> T:
    try:
        return step()
    except StopIteration:
        raise PolicyFault(
            f"task {attempt.uid}: the agent returned before the end of the episode. Let its last turn end with <DONE>."
        ) from None
    except (PolicyFault, ConfigError):  # the second: no attempt of this run can succeed
        raise
    except (Exception, SystemExit) as error:  # the episode boundary: any error of an agent voids the episode
        raise PolicyFault(
            f"task {attempt.uid}: the agent raised {words_of(error)}. The episode is void; fix the agent."
        ) from error
