"""Conversations that others lead with a policy: a thread writes all answers together.

Each question is a whole conversation as tokens. One that begins with all that an earlier question gave goes on where
that one stands: what its slot, or its parked row, holds of the same tokens is not computed again. Otherwise a fresh
episode begins. The conversation that was used least recently is forgotten when there are too many.

What is written depends on tokens, seed and key alone, never on who else asks.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tbx_envs.errors import PolicyFault
from tbx_jax.models import Params
from tbx_jax.sampler.sampler import SampledTurn, Sampler, TurnKey


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What is to be answered.

    Attributes:
        tokens: the whole conversation.
        turn_key: names the randomness of the answer.
        temperature: None is the sampler's.
        max_tokens: of the answer; None, or more than the sampler's limit, is that limit.
        is_enough: True for tokens after which the answer may end; asked after every dispatch.
    """

    tokens: Sequence[int]
    turn_key: TurnKey
    temperature: float | None = None
    max_tokens: int | None = None
    is_enough: Callable[[Sequence[int]], bool] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What was written.

    Attributes:
        turn: its tokens and log-probabilities.
        cached_tokens: of the question, those that were not computed again.
    """

    turn: SampledTurn
    cached_tokens: int


@dataclasses.dataclass(slots=True)
class _Conversation:
    """An episode of the sampler.

    Attributes:
        given: tokens of its last question.
        asked: the question that waits for its answer, or None.
        answer: where the answer is waited for.
        cached: tokens of the question that were not computed again.
    """

    given: list[int]
    asked: Question | None = None
    answer: Future[Answer] | None = None
    cached: int = 0


class Conversations:
    """Answers questions until it is closed; a context manager.

    Args:
        sampler: without episodes of its own.
        params: of the policy.
        most: conversations that are remembered; more only while all of them wait for an answer.
    """

    def __init__(self, sampler: Sampler, params: Params, *, most: int) -> None:
        self._sampler, self._params, self._most = sampler, params, most
        self._known: dict[int, _Conversation] = {}  # the one that was used least recently first
        self._numbers = 0
        self._asked: collections.deque[tuple[Question, Future[Answer]]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tbx-conversations", daemon=True)

    def __enter__(self) -> Conversations:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Questions that are not answered yet get a `PolicyFault`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def broken(self) -> Exception | None:
        """What ended the thread, if anything did."""
        return self._broken

    def ask(self, question: Question) -> Future[Answer]:
        """The answer, later; cancel it when nobody waits any more. Any thread may ask.

        Raises:
            PolicyFault: closed, or broken.
        """
        answer: Future[Answer] = Future()
        with self._changed:
            if self._closed or self._broken is not None:
                raise PolicyFault(f"no more questions are answered: {self._broken or 'the server is going down'}")
            self._asked.append((question, answer))
            self._changed.notify()
        return answer

    def _run(self) -> None:
        try:
            while self._take_questions():
                for turn in self._sampler.advance(self._params):
                    self._end(turn)
                self._end_early()
        except Exception as error:  # the boundary of the thread: whatever broke it, those who wait must hear of it
            self._broken = error
            logging.getLogger(__name__).exception("the sampler broke; no more questions are answered")
        finally:
            self._refuse_all()

    def _take_questions(self) -> bool:
        """Begins what was asked; waits when there is nothing to write. False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._asked or self._sampler.busy)
            if self._closed:
                return False
            asked = list(self._asked)
            self._asked.clear()
        for question, answer in asked:
            if not answer.cancelled():
                self._begin(question, answer)
        return True

    def _begin(self, question: Question, answer: Future[Answer]) -> None:
        tokens = list(question.tokens)
        settings = {"temperature": question.temperature, "max_turn_tokens": question.max_tokens}
        number = self._to_go_on_with(tokens)
        if number is None:
            self._forget(self._most - 1)
            self._numbers += 1
            number, cached = self._numbers, 0
            self._sampler.begin(number, tokens, question.turn_key, **settings)
        else:
            del self._known[number]
            cached = self._sampler.resume(number, tokens, question.turn_key, **settings)
        self._known[number] = _Conversation(tokens, question, answer, cached)

    def _to_go_on_with(self, tokens: list[int]) -> int | None:
        """The idle conversation whose last question these tokens begin with, and which saves most."""
        idle = [
            number
            for number, known in self._known.items()
            if known.asked is None and tokens[: len(known.given)] == known.given
        ]
        return max(idle, key=lambda number: (self._sampler.num_reusable(number, tokens), number), default=None)

    def _forget(self, most: int) -> None:
        """Leaves so many conversations, the most recently used, and those that wait for an answer."""
        idle = [number for number, known in self._known.items() if known.asked is None]
        for number in idle[: max(0, len(self._known) - most)]:
            self._sampler.free(number)
            del self._known[number]

    def _end(self, turn: SampledTurn) -> None:
        known = self._known[turn.episode]
        answer, known.asked, known.answer = known.answer, None, None
        if answer.set_running_or_notify_cancel():
            answer.set_result(Answer(turn, known.cached))
        self._forget(self._most)

    def _end_early(self) -> None:
        """Ends turns that have enough, and those that nobody waits for any more."""
        for number, known in list(self._known.items()):
            enough = known.asked and known.asked.is_enough
            if known.asked and (known.answer.cancelled() or (enough and enough(self._sampler.written(number)))):
                self._end(self._sampler.end_turn(number))

    def _refuse_all(self) -> None:
        """Whoever waits gets an error."""
        with self._changed:
            self._closed = True
            waiting = [answer for _, answer in self._asked] + [known.answer for known in self._known.values()]
        words = f"the sampler broke: {self._broken!r}" if self._broken else "the server went down"
        for answer in waiting:
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_exception(PolicyFault(f"{words} before the answer was written"))
