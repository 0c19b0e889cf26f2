"""Served models, asked through chat completions as OpenAI defined them and most servers speak them.

    config = EndpointConfig("http://127.0.0.1:8000/v1", model="Qwen/Qwen3-0.6B")
    with ChatEndpoint(config) as endpoint:
        completion = endpoint.complete([{"role": "user", "content": "Is the sky blue?"}])

A completion executes nothing, so a request may be sent again after whatever went wrong on the way: 429, 5xx, a
connection that was refused or cut. It is not sent again when the answer would be the same (400, 401, 403, 404), and
not after its time limit, since a model that writes for too long would be paid for once more.

The key is read from the environment when a request is made and is kept nowhere: no record, message or log has it, and
it is taken out of what servers answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from tbx_envs.endpoints.config import EndpointConfig
from tbx_envs.endpoints.costs import NOTHING_USED, TokenUsage
from tbx_envs.endpoints.responses import Completion, Problem, read_answer
from tbx_envs.endpoints.transport import NoReply, Reply, Stopped, Transport
from tbx_envs.errors import ConfigError, EndpointError
from tbx_envs.seeding import rng

PATH = "/chat/completions"

# Waits before a request is sent again: doubling from the first to the longest, each shortened by up to a half so
# that callers who failed together do not come back together. A server that asks for more patience than the last gets
# none: a run must not stand still for an hour without a word.
FIRST_WAIT_S, LONGEST_WAIT_S, MOST_PATIENCE_S = 0.5, 30.0, 120.0

_POLL_S = 0.1  # how soon a caller that was told to stop notices
_OURS = frozenset({"messages", "model", "n", "stream", "tools", "tool_choice"})  # not for `extra_body`


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointTotals:
    """What an endpoint has done so far.

    Attributes:
        requests: sent, those sent again included.
        completions: that came back.
        failures: questions that ended as an `EndpointError`.
        usage: tokens of all completions; unknown as soon as one came without a count.
    """

    requests: int = 0
    completions: int = 0
    failures: int = 0
    usage: TokenUsage = NOTHING_USED


class ChatEndpoint:
    """A served model. All threads may ask at once; `close` it at the end, or use it as a context manager.

    Args:
        config: where and how.
        sleep: waits before a request is sent again; for tests.
        seed: of the waits' jitter.

    Raises:
        ConfigError: settings that cannot work, all of them named.
    """

    def __init__(self, config: EndpointConfig, *, sleep: Callable[[float], None] | None = None, seed: int = 0) -> None:
        problems = list(_config_problems(config))
        if problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise ConfigError(f"the endpoint for model '{config.model}' cannot be used:{lines}")
        self.config = config
        self._url = config.base_url.rstrip("/") + PATH
        self._sleep = sleep
        self._seed = seed
        self._is_stopped = False  # no Event: a signal handler sets it, and must take no lock
        self._turns = threading.BoundedSemaphore(config.concurrency)
        self._lock = threading.Lock()
        self._totals = EndpointTotals()
        self._numbers = itertools.count()  # of questions, for their jitter; drawing one is atomic
        self._transport = Transport(self._url, _Bearer(config.api_key_env), config.timeout_s, config.concurrency)

    def __repr__(self) -> str:
        return f"ChatEndpoint({self.config!r})"

    @property
    def totals(self) -> EndpointTotals:
        """What it has done so far, all threads together."""
        with self._lock:
            return self._totals

    def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        seed: int | None = None,
        stop: threading.Event | None = None,
    ) -> Completion:
        """What the model answers to `messages`; arguments left None are the configuration's, or are not sent.

        Args:
            messages: chat dictionaries as OpenAI wants them.
            seed: of the model's sampling; servers that know no seeds mostly ignore it.
            stop: set by another thread when the answer is not wanted any more: the request is taken back.

        Raises:
            ContextExceeded: the conversation is too long for the model.
            EndpointRefused: nothing will be answered until the settings are changed.
            EndpointError: no usable answer; says what was tried.
        """
        wanted: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        wanted |= {"tools": list(tools) if tools else None, "tool_choice": tool_choice}
        body = self._body(messages, wanted)

        def is_unwanted() -> bool:
            return self._is_stopped or (stop is not None and stop.is_set())

        try:
            self._wait_for_a_turn(is_unwanted)
            try:
                completion = self._ask(body, is_unwanted)
            finally:
                self._turns.release()
        except EndpointError:
            self._count(failures=1)
            raise
        self._count(completions=1, usage=completion.usage)
        return completion

    def _body(self, messages: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]) -> bytes:
        fields = {
            "model": self.config.model,
            "messages": list(messages),
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            **{name: value for name, value in wanted.items() if value is not None},
            **self.config.extra_body,
        }
        try:
            # Escaped to ASCII, so that half a surrogate pair in somebody's words cannot break the request.
            text = json.dumps({name: value for name, value in fields.items() if value is not None}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EndpointError(
                f"a request to {self._url} has no JSON form: {error}. Send plain JSON values."
            ) from error
        return text.encode("ascii")

    def _wait_for_a_turn(self, is_unwanted: Callable[[], bool]) -> None:
        while not self._turns.acquire(timeout=_POLL_S):
            if is_unwanted():
                raise self._taken_back()

    def _taken_back(self) -> EndpointError:
        return EndpointError(f"POST {self._url}: taken back before it was answered, since the run stops.")

    def _ask(self, body: bytes, is_unwanted: Callable[[], bool]) -> Completion:
        """Sends the request until there is a completion, or a reason to give up."""
        number, sent = next(self._numbers), 0
        while not is_unwanted():
            self._count(requests=1)
            sent += 1
            outcome = self._read(self._transport.post(body, is_unwanted))
            if isinstance(outcome, Completion):
                return outcome
            wait_s = self._wait_s(outcome, sent, number)
            if wait_s is None:
                times = f" (sent {sent} times)" if sent > 1 else ""
                raise outcome.error(f"POST {self._url}, model '{self.config.model}'{times}: {outcome.words}")
            self._rest(wait_s, is_unwanted)
        raise self._taken_back()

    def _wait_s(self, problem: Problem, sent: int, number: int) -> float | None:
        """How long to wait before the request is sent again; None to give up."""
        if not problem.again or sent > self.config.max_retries:
            return None
        wait_s = min(FIRST_WAIT_S * 2 ** (sent - 1), LONGEST_WAIT_S)
        wait_s *= 1 - rng(self._seed, "jitter", number, sent).random() / 2
        if problem.patience_s is None:
            return wait_s
        return max(wait_s, problem.patience_s) if problem.patience_s <= MOST_PATIENCE_S else None

    def _rest(self, wait_s: float, is_unwanted: Callable[[], bool]) -> None:
        if self._sleep is not None:
            self._sleep(wait_s)
            return
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0 and not is_unwanted():
            time.sleep(min(left_s, _POLL_S))

    def _read(self, answer: Reply | NoReply | Stopped) -> Completion | Problem:
        """In a function of its own, since the frame of one that raises must not hold the key."""
        variable = self.config.api_key_env
        return read_answer(answer, key_variable=variable, key=_key(variable))

    def _count(
        self, *, requests: int = 0, completions: int = 0, failures: int = 0, usage: TokenUsage = NOTHING_USED
    ) -> None:
        with self._lock:
            so_far = self._totals
            self._totals = EndpointTotals(
                so_far.requests + requests,
                so_far.completions + completions,
                so_far.failures + failures,
                so_far.usage + usage,
            )

    def stop(self) -> None:
        """All requests fail from now on, and those that wait for an answer at once, in whatever thread.

        Waits for nothing and takes no lock, so a signal handler may call it; `close` has to follow.
        """
        self._is_stopped = True

    def close(self) -> None:
        """Take back what is on its way and close all connections; a second call does nothing."""
        self.stop()
        self._transport.close()

    def __enter__(self) -> ChatEndpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def stopped_by_interrupts(endpoints: Iterable[ChatEndpoint]) -> Iterator[None]:
    """An interrupt from the keyboard stops these endpoints before anything else happens.

    It is raised in the main thread only, and on its way out it passes places that wait for other threads: episodes
    that run, a check whose test asks its judge. Those would wait until a silent server's time limit.

    For the main thread; in another one, and where interrupts are ignored, it does nothing.
    """
    stopping = tuple(endpoints)
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupted(*arguments: Any) -> None:
        try:
            before(*arguments)
        except BaseException:  # a handler that raises nothing lets the run go on
            for endpoint in stopping:
                endpoint.stop()
            raise

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- settings and key ---------------------------------------------------------------------------------------


def _config_problems(config: EndpointConfig) -> Iterator[str]:
    yield from _address_problems(config.base_url)
    if not config.model:
        yield "model is empty: give the name under which the server knows it."
    least_of = {"timeout_s": 0.0, "concurrency": 1, "max_retries": 0, "max_tokens": 1, "temperature": 0.0}
    for name, least in least_of.items():
        value = getattr(config, name)
        if value is None:
            continue
        if value < least or (name == "timeout_s" and value == 0):
            yield f"{name}={value}: wanted {'more than 0' if name == 'timeout_s' else f'{least} or more'}."
    taken = sorted(_OURS & config.extra_body.keys())
    if taken:
        yield f"extra_body sets {', '.join(taken)}, which tbx sets itself: take it out."
    try:
        json.dumps(dict(config.extra_body), allow_nan=False)
    except (TypeError, ValueError) as error:
        yield f"extra_body has no JSON form: {error}."
    try:
        _key(config.api_key_env)
    except EndpointError as error:
        yield str(error)


def _address_problems(base_url: str) -> Iterator[str]:
    """Never repeats the address where it may hold a secret."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        yield "base_url is no address: wanted something like http://127.0.0.1:8000/v1."
        return
    if url.userinfo or url.query or url.fragment:
        yield "base_url has a user, a query or a fragment: a key belongs into the variable that api_key_env names."
    elif url.scheme not in ("http", "https") or not url.host:
        yield f"base_url='{base_url}': wanted http:// or https:// and a host, such as http://127.0.0.1:8000/v1."
    elif url.path.rstrip("/").endswith(PATH):
        yield f"base_url='{base_url}': leave {PATH} out, it is appended."


def _key(variable: str | None) -> str | None:
    """The key, fresh from the environment.

    Raises:
        EndpointError: the variable holds none.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EndpointError(f"the environment variable {variable} holds no key: set it, or set api_key_env to null.")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise EndpointError(
            f"the key in {variable} has characters that no key has (a line break, a space): set it again."
        )
    return key


class _Bearer(httpx.Auth):
    """Puts the key into a request at the last moment, so that no frame and no record of ours holds it."""

    def __init__(self, variable: str | None) -> None:
        self._variable = variable

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        key = _key(self._variable)
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key}"
        yield request
