"""A client of served models, for the chat completions API that OpenAI defined and most servers implement.

    config = EndpointConfig("http://127.0.0.1:8000/v1", model="Qwen/Qwen3-0.6B")
    with ChatEndpoint(config) as endpoint:
        completion = endpoint.complete([{"role": "user", "content": "Is the sky blue?"}])

A completion executes nothing, so a request may be retried after any transient failure: 429, 5xx, a connection that was
refused or cut. It is not retried when the answer would be the same (400, 401, 403, 404), nor after its time limit,
since a model that writes for too long would be paid for again.

The key is read from the environment for each request and stored nowhere: no record, message or log contains it, and it
is removed from what servers answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from tbx_envs.endpoints.config import EndpointConfig
from tbx_envs.endpoints.costs import NOTHING_USED, TokenUsage
from tbx_envs.endpoints.responses import CANCELLED, Completion, Problem, read_answer
from tbx_envs.endpoints.transport import NoReply, Reply, Stopped, Transport
from tbx_envs.errors import ConfigError, EndpointError
from tbx_envs.seeding import rng

PATH = "/chat/completions"

# Waits before a retry: doubling from the first to the longest, each shortened by up to a half so that callers that
# failed together do not retry together. When a server asks for a longer wait than the last value, the request is not
# retried: a run must not stall for an hour silently.
FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_RETRY_AFTER_S = 0.5, 30.0, 120.0

_POLL_S = 0.1  # how often a waiting caller checks whether it should stop
_OURS = frozenset({"messages", "model", "n", "stream", "tools", "tool_choice"})  # fields that `extra_body` may not set


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointTotals:
    """Counts of an endpoint so far.

    Attributes:
        requests: number of requests sent, including retries.
        completions: number of completions received.
        failures: number of calls of `complete` that raised an `EndpointError`.
        usage: tokens of all completions; unknown as soon as one came without counts.
    """

    requests: int = 0
    completions: int = 0
    failures: int = 0
    usage: TokenUsage = NOTHING_USED


class ChatEndpoint:
    """A served model. Thread-safe; `close` it at the end, or use it as a context manager.

    Args:
        config: address and settings.
        spent: function called with the tokens of each completion as it arrives, in the thread that asked.
        sleep: function that waits before a retry; for tests.
        seed: seed of the jitter of waits.

    Raises:
        ConfigError: settings that cannot work; the message lists all of them.
    """

    def __init__(
        self,
        config: EndpointConfig,
        *,
        spent: Callable[[TokenUsage], None] | None = None,
        sleep: Callable[[float], None] | None = None,
        seed: int = 0,
    ) -> None:
        problems = list(_config_problems(config))
        if problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise ConfigError(f"the endpoint for model '{config.model}' cannot be used:{lines}")
        self.config = config
        self._url = config.base_url.rstrip("/") + PATH
        self._spent = spent
        self._sleep = sleep
        self._seed = seed
        self._is_stopped = False  # not an Event: a signal handler sets it and must not take a lock
        self._slots = threading.BoundedSemaphore(config.concurrency)
        self._lock = threading.Lock()
        self._totals = EndpointTotals()
        self._numbers = itertools.count()  # numbers of completions, for their jitter; `next` is atomic
        self._transport = Transport(self._url, _Bearer(config.api_key_env), config.timeout_s, config.concurrency)

    def __repr__(self) -> str:
        return f"ChatEndpoint({self.config!r})"

    @property
    def totals(self) -> EndpointTotals:
        """Counts of all threads so far."""
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
        """The model's completion of `messages`; None takes the configuration's value, or sends no such field.

        Args:
            messages: chat dictionaries in OpenAI's format.
            temperature: sampling temperature.
            max_tokens: maximum number of tokens to write.
            tools: OpenAI-function style dictionaries.
            tool_choice: the API's field of that name.
            seed: seed of the model's sampling; servers without seeds usually ignore it.
            stop: event that another thread sets to cancel the request.

        Raises:
            ContextExceeded: the conversation is too long for the model.
            EndpointRefused: the server answers no request with these settings.
            EndpointError: there is no usable answer; the message says what was tried.
        """
        wanted: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        wanted |= {"tools": list(tools) if tools else None, "tool_choice": tool_choice}
        body = self._body(messages, wanted)

        def is_unwanted() -> bool:
            return self._is_stopped or (stop is not None and stop.is_set())

        try:
            self._acquire_slot(is_unwanted)
            try:
                completion = self._ask(body, is_unwanted)
            finally:
                self._slots.release()
        except EndpointError:
            self._count(failures=1)
            raise
        self._count(completions=1, usage=completion.usage)
        if self._spent is not None:
            self._spent(completion.usage)
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
            # Escaped to ASCII, so that half of a surrogate pair in some text cannot break the request.
            text = json.dumps({name: value for name, value in fields.items() if value is not None}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EndpointError(
                f"a request to {self._url} has no JSON form: {error}. Send plain JSON values."
            ) from error
        return text.encode("ascii")

    def _acquire_slot(self, is_unwanted: Callable[[], bool]) -> None:
        while not self._slots.acquire(timeout=_POLL_S):
            if is_unwanted():
                raise self._cancelled()

    def _cancelled(self) -> EndpointError:
        return EndpointError(f"POST {self._url}: {CANCELLED}")

    def _ask(self, body: bytes, is_unwanted: Callable[[], bool]) -> Completion:
        """Send the request until there is a completion or a reason to give up."""
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
                raise outcome.error(f"POST {self._url}, model '{self.config.model}'{times}: {outcome.text}")
            self._wait(wait_s, is_unwanted)
        raise self._cancelled()

    def _wait_s(self, problem: Problem, sent: int, number: int) -> float | None:
        """Seconds to wait before the next retry; None to give up."""
        if not problem.retry or sent > self.config.max_retries:
            return None
        wait_s = min(FIRST_WAIT_S * 2 ** (sent - 1), LONGEST_WAIT_S)
        wait_s *= 1 - rng(self._seed, "jitter", number, sent).random() / 2
        if problem.retry_after_s is None:
            return wait_s
        return max(wait_s, problem.retry_after_s) if problem.retry_after_s <= LONGEST_RETRY_AFTER_S else None

    def _wait(self, wait_s: float, is_unwanted: Callable[[], bool]) -> None:
        if self._sleep is not None:
            self._sleep(wait_s)
            return
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0 and not is_unwanted():
            time.sleep(min(left_s, _POLL_S))

    def _read(self, answer: Reply | NoReply | Stopped) -> Completion | Problem:
        """The outcome of an answer. A separate function, since the frame of one that raises must not hold the key."""
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
        """Make all requests of all threads fail: those in flight at once, and all later ones.

        Does not wait and takes no lock, so a signal handler may call it; `close` must follow.
        """
        self._is_stopped = True

    def close(self) -> None:
        """Cancel requests in flight and close all connections; a second call does nothing."""
        self.stop()
        self._transport.close()

    def __enter__(self) -> ChatEndpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def stopped_by_interrupts(endpoints: Iterable[ChatEndpoint]) -> Iterator[None]:
    """Make a keyboard interrupt stop these endpoints before anything else happens.

    The interrupt is raised in the main thread only, and while it propagates it passes code that waits for other
    threads: running episodes, a check whose test asks its judge. Those would wait for a silent server's time limit.

    For the main thread; in another thread, and where interrupts are ignored, it does nothing.
    """
    stopping = tuple(endpoints)
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupted(*arguments: Any) -> None:
        try:
            before(*arguments)
        except BaseException:  # a handler that raises nothing lets the run continue
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
        yield "model is empty: give the name of the model on the server."
    least_of = {"timeout_s": 0.0, "concurrency": 1, "max_retries": 0, "max_tokens": 1, "temperature": 0.0}
    for name, least in least_of.items():
        value = getattr(config, name)
        if value is None:
            continue
        if value < least or (name == "timeout_s" and value == 0):
            yield f"{name}={value}: wanted {'more than 0' if name == 'timeout_s' else f'{least} or more'}."
    taken = sorted(_OURS & config.extra_body.keys())
    if taken:
        yield f"extra_body sets {', '.join(taken)}, which tbx sets itself: remove it."
    try:
        json.dumps(dict(config.extra_body), allow_nan=False)
    except (TypeError, ValueError) as error:
        yield f"extra_body has no JSON form: {error}."
    try:
        _key(config.api_key_env)
    except EndpointError as error:
        yield str(error)


def _address_problems(base_url: str) -> Iterator[str]:
    """Problems of the address, which is not repeated where it may hold a secret."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        yield "base_url is not a URL: wanted something like http://127.0.0.1:8000/v1."
        return
    if url.userinfo or url.query or url.fragment:
        yield "base_url has a user, a query or a fragment: a key belongs in the variable that api_key_env names."
    elif url.scheme not in ("http", "https") or not url.host:
        yield f"base_url='{base_url}': wanted http:// or https:// and a host, such as http://127.0.0.1:8000/v1."
    elif url.path.rstrip("/").endswith(PATH):
        yield f"base_url='{base_url}': leave {PATH} out, it is appended."


def _key(variable: str | None) -> str | None:
    """The key in an environment variable.

    Raises:
        EndpointError: the variable holds no usable key.
    """
    if variable is None:
        return None
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise EndpointError(
            "api_key_env is no name of a variable (it is not repeated here, since it may be the key itself). Put the "
            "key into a variable of the environment, and its name there."
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EndpointError(f"the environment variable {variable} holds no key: set it, or set api_key_env to null.")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise EndpointError(
            f"the key in {variable} contains characters that no key has (a line break, a space): set it again."
        )
    return key


class _Bearer(httpx.Auth):
    """Adds the key to a request at the last moment, so that no frame and no record of ours holds it."""

    def __init__(self, variable: str | None) -> None:
        self._variable = variable

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        key = _key(self._variable)
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key}"
        yield request
