"""HTTP requests with a time limit on the whole request, for callers in any thread.

A separate thread with an event loop sends the requests of all callers. httpx's blocking client limits single reads
only, so a server that sends one byte now and then would block its caller for ever; here the whole request is cancelled,
whatever it is waiting for. For the same reason a caller can cancel a request at any moment.

Failures of a server are returned, not raised, so that no exception (and no traceback) keeps a request with its headers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

# Of one answer, decompressed: the longest that a model writes is a few megabytes, escapes and all.
MAX_ANSWER_BYTES = 32 * 2**20

_CONNECT_S = 10.0  # connecting has a shorter limit than an answer, for which a model may think
_POLL_S = 0.1  # how often a waiting caller checks whether it should stop
_THREAD = "tbx-endpoint"
_HTTP_LOGGERS = ("httpx", "httpcore.http11", "httpcore.http2", "httpcore.proxy", "httpcore.connection")
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        status: HTTP status.
        content: body, not parsed; at most `MAX_ANSWER_BYTES`.
        content_type, retry_after, date: headers, None when missing.
    """

    status: int
    content: bytes
    content_type: str | None
    retry_after: str | None
    date: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class NoReply:
    """A request without a complete answer.

    Attributes:
        text: what happened, and what to do.
        retry: True when the same request may succeed later.
    """

    text: str
    retry: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """The caller cancelled the request, or the transport was closed."""


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    """False, in our thread, for httpx's line for every request, which would drown the log of a run, and for the headers
    that httpcore logs, in which a server may have put the key."""
    if record.threadName != _THREAD:
        return True
    return record.name != "httpx" and "headers.complete" not in str(record.msg)


class Transport:
    """Posts JSON to one address.

    Args:
        url: address of the server.
        auth: authentication added to each request.
        timeout_s: time limit of one request as a whole.
        connections: maximum number of idle connections that are kept open.
    """

    def __init__(self, url: str, auth: httpx.Auth, timeout_s: float, connections: int) -> None:
        self._url = url
        self._auth = auth
        self._timeout_s = timeout_s
        self._connections = connections
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._closed = False
        for name in _HTTP_LOGGERS:
            logging.getLogger(name).addFilter(_is_to_be_logged)

    def post(self, body: bytes, is_unwanted: Callable[[], bool]) -> Reply | NoReply | Stopped:
        """The answer to `body`, within the time limit.

        Args:
            body: JSON text.
            is_unwanted: polled while waiting; the request is cancelled as soon as it returns True.
        """
        future = self._submit(body)
        if future is None:
            return Stopped()
        try:
            while not concurrent.futures.wait([future], _POLL_S).done:
                if is_unwanted():
                    future.cancel()
                    return Stopped()
            return Stopped() if future.cancelled() else future.result()
        except BaseException:  # a keyboard interrupt: no one waits for the answer any more
            future.cancel()
            raise

    def _submit(self, body: bytes) -> concurrent.futures.Future[Reply | NoReply] | None:
        """Submit the request to the sending thread, of which a forked process gets its own. None once closed.

        The lock is held, so that a submitted request precedes the thread's end and is cancelled by it.
        """
        with self._lock:
            if self._closed:
                return None
            if self._worker is None or self._worker.pid != os.getpid():
                self._worker = _Worker(self._new_client())
                weakref.finalize(self, self._worker.close)
            return self._worker.submit(self._send(self._worker.client, body))

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            auth=self._auth,
            timeout=httpx.Timeout(None, connect=min(_CONNECT_S, self._timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._connections),
            # Proxies and certificates from the environment, but never a proxy for this machine.
            trust_env=not httpx.URL(self._url).host.startswith(_LOOPBACK),
        )

    async def _send(self, client: httpx.AsyncClient, body: bytes) -> Reply | NoReply:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client.stream("POST", self._url, content=body, headers=headers) as answer,
            ):
                content = await _read(answer)
        except TimeoutError:
            return NoReply(
                f"no complete answer within {self._timeout_s:g} s. Raise timeout_s, lower max_tokens, or lower "
                f"concurrency.",
                False,
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return NoReply(f"no connection ({_said(error)}). Check base_url, and that the server is running.", True)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return NoReply(f"the connection was cut ({_said(error)}). See the server's own log.", True)
        except httpx.HTTPError as error:
            return NoReply(f"the answer is not valid HTTP ({_said(error)}). Check base_url.", False)
        if content is None:
            return NoReply(
                f"the answer has more than {MAX_ANSWER_BYTES:,} bytes. Check base_url, and lower max_tokens.", False
            )
        found = answer.headers
        return Reply(
            answer.status_code, content, found.get("content-type"), found.get("retry-after"), found.get("date")
        )

    def close(self) -> None:
        """Cancel requests in flight and close all connections; a second call does nothing."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


async def _read(answer: httpx.Response) -> bytes | None:
    """The body; None as soon as it is larger than what is read."""
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            return None
    return bytes(body)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


class _Worker:
    """A thread with an event loop, and the client whose connections live in it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.pid = os.getpid()
        self.client = client
        self._loop = asyncio.SelectorEventLoop()  # whatever policy is set
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
        finally:
            self._loop.close()

    async def _finish(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.client.aclose()
        await self._loop.shutdown_asyncgens()

    def close(self) -> None:
        """End the thread, once; a forked process has no such thread, and the connections are its parent's."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # the garbage collector may call this there
            self._thread.join()
