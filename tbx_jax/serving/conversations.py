"""Conversations of clients with a policy: one thread samples all answers together.

A question is a whole conversation as tokens. If its tokens start with those of an earlier question, it continues the
earlier question's episode and reuses its cached tokens, in a cache row or swapped out; otherwise it starts a new
episode. When there are too many conversations, the least recently used one is dropped.

The invariant: an answer depends on tokens, seed and key alone, never on other questions.
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
    """A request for an answer.

    Attributes:
        tokens: token ids of the whole conversation.
        turn_key: name of the answer's randomness.
        temperature: sampling temperature; None is the sampler's.
        max_tokens: token limit of the answer; None, or more than the sampler's limit, is the sampler's.
        is_enough: function that is True for tokens after which the answer may end; called after every dispatch.
    """

    tokens: Sequence[int]
    turn_key: TurnKey
    temperature: float | None = None
    max_tokens: int | None = None
    is_enough: Callable[[Sequence[int]], bool] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        turn: tokens and log-probabilities.
        cached_tokens: number of the question's tokens that were reused.
    """

    turn: SampledTurn
    cached_tokens: int


_Asked = tuple[Question, Future[Answer]]


@dataclasses.dataclass(slots=True)
class _Conversation:
    """An episode of the sampler.

    Attributes:
        given: tokens of its last question.
        asked: question in progress and the future of its answer; None when idle.
        cached: number of the question's tokens that were reused.
    """

    given: list[int]
    asked: _Asked | None = None
    cached: int = 0


class Conversations:
    """Answers questions until it is closed; a context manager.

    Args:
        sampler: sampler without episodes.
        params: parameters of the policy.
        most: number of conversations to keep; exceeded only while all of them wait for an answer.
    """

    def __init__(self, sampler: Sampler, params: Params, *, most: int) -> None:
        self._sampler, self._params, self._most = sampler, params, most
        self._known: dict[int, _Conversation] = {}  # least recently used first
        self._numbers = 0
        self._asked: collections.deque[_Asked] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tbx-conversations", daemon=True)

    def __enter__(self) -> Conversations:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends the thread; questions without an answer get a `PolicyFault`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def broken(self) -> Exception | None:
        """The error that ended the thread, or None."""
        return self._broken

    def ask(self, question: Question) -> Future[Answer]:
        """The future of the answer; cancel it to give up. Thread-safe.

        Raises:
            PolicyFault: the server is closed, or broken.
        """
        answer: Future[Answer] = Future()
        with self._changed:
            if self._closed or self._broken is not None:
                raise PolicyFault(f"the server takes no more questions: {self._broken or 'it is going down'}")
            self._asked.append((question, answer))
            self._changed.notify()
        return answer

    def _run(self) -> None:
        try:
            while self._take_questions():
                for turn in self._sampler.advance(self._params):
                    self._end(turn)
                self._end_early()
        except Exception as error:  # the boundary of the thread: every waiting question must get the error
            self._broken = error
            logging.getLogger(__name__).exception("the sampler broke; the server takes no more questions")
        finally:
            self._fail_all()

    def _take_questions(self) -> bool:
        """Starts new questions, and waits for one when the sampler is idle. False when the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._closed or self._asked or self._sampler.busy))
            if self._closed:
                return False
            asked = list(self._asked)
            self._asked.clear()
        for question, answer in asked:
            if not answer.cancelled():
                self._start(question, answer)
        return True

    def _start(self, question: Question, answer: Future[Answer]) -> None:
        tokens, turn_key = list(question.tokens), question.turn_key
        temperature, limit = question.temperature, question.max_tokens
        number = self._to_resume(tokens)
        if number is None:
            self._drop_idle(self._most - 1)
            self._numbers += 1
            number, cached = self._numbers, 0
            self._sampler.begin(number, tokens, turn_key, temperature=temperature, max_turn_tokens=limit)
        else:
            del self._known[number]
            cached = self._sampler.resume(number, tokens, turn_key, temperature=temperature, max_turn_tokens=limit)
        self._known[number] = _Conversation(tokens, (question, answer), cached)

    def _to_resume(self, tokens: list[int]) -> int | None:
        """The idle conversation whose last question is a prefix of these tokens, with the most reusable tokens."""
        idle = [
            number
            for number, known in self._known.items()
            if known.asked is None and tokens[: len(known.given)] == known.given
        ]
        return max(idle, key=lambda number: (self._sampler.num_reusable(number, tokens), number), default=None)

    def _drop_idle(self, most: int) -> None:
        """Drops idle conversations, least recently used first, until at most `most` are left."""
        idle = [number for number, known in self._known.items() if known.asked is None]
        for number in idle[: max(0, len(self._known) - most)]:
            self._sampler.free(number)
            del self._known[number]

    def _end(self, turn: SampledTurn) -> None:
        known = self._known[turn.episode]
        assert known.asked is not None  # the sampler returns only turns that a question requested
        (_, answer), known.asked = known.asked, None
        if answer.set_running_or_notify_cancel():
            answer.set_result(Answer(turn, known.cached))
        self._drop_idle(self._most)

    def _end_early(self) -> None:
        """Ends turns that are enough, and turns whose answer was cancelled."""
        for number, known in list(self._known.items()):
            if known.asked is None:
                continue
            question, answer = known.asked
            enough = question.is_enough
            if answer.cancelled() or (enough and enough(self._sampler.sampled_so_far(number))):
                self._end(self._sampler.end_turn(number))

    def _fail_all(self) -> None:
        """Sets an error on every question without an answer."""
        with self._changed:
            self._closed = True
            waiting = [*self._asked, *(known.asked for known in self._known.values() if known.asked is not None)]
        reason = f"the sampler broke: {self._broken!r}" if self._broken else "the server went down"
        for _, answer in waiting:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(PolicyFault(f"{reason} before the answer was written"))
