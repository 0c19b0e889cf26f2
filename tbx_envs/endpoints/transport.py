"""HTTP requests with a time limit that holds, for callers in any thread.

A thread of its own with an event loop sends what all callers ask for. httpx's blocking client limits single reads
only, so a server that sends one byte now and then would hold its caller for ever; here the whole request is cancelled,
whatever it is waiting for. For the same reason a caller can take a request back at any moment.

Nothing is raised on what a server does: it is returned, so that no exception (and no traceback) drags a request with
its headers along.
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
from typing import Any

import httpx

_CONNECT_S = 10.0  # a host that does not even connect is given up sooner than a model that thinks
_POLL_S = 0.1  # how soon a caller that was told to stop notices
_THREAD = "tbx-endpoint"
_HTTP_LOGGERS = ("httpx", "httpcore.http11", "httpcore.http2", "httpcore.proxy", "httpcore.connection")
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer.

    Attributes:
        status: of HTTP.
        content: the body, unread.
        content_type, retry_after, date: headers, None when missing.
    """

    status: int
    content: bytes
    content_type: str | None
    retry_after: str | None
    date: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class NoReply:
    """No whole answer came.

    Attributes:
        words: what happened, and what to do.
        again: True when the same request may fare better.
    """

    words: str
    again: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """The caller took the request back, or the transport was closed."""


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    """False, for our thread, for httpx's line at every request, which would drown a run's own words, and for what
    httpcore logs of headers: a server may have put the key into its own."""
    if record.threadName != _THREAD:
        return True
    return record.name != "httpx" and "headers.complete" not in str(record.msg)


class Transport:
    """Posts JSON to one address.

    Args:
        url: the address.
        auth: adds what proves who asks.
        timeout_s: of one request as a whole.
        connections: how many are kept open for the next request.
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
        """What comes of sending `body`, within the time limit.

        Args:
            is_unwanted: asked again and again; the request is taken back as soon as it says True.
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
        except BaseException:  # an interrupt from the keyboard: nobody waits for the answer any more
            future.cancel()
            raise

    def _submit(self, body: bytes) -> concurrent.futures.Future[Reply | NoReply] | None:
        """Hands the request to the thread that sends; a process that was forked gets its own. None once closed.

        Under the lock, so that what was handed over comes before the thread's end and is cancelled by it.
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
            # Proxies and certificates from the environment, but never a proxy on the way to this machine.
            trust_env=not httpx.URL(self._url).host.startswith(_LOOPBACK),
        )

    async def _send(self, client: httpx.AsyncClient, body: bytes) -> Reply | NoReply:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await client.post(self._url, content=body, headers=headers)
        except TimeoutError:
            return NoReply(
                f"no whole answer within {self._timeout_s:g} s. Raise timeout_s, lower max_tokens, or ask for less at "
                f"the same time.",
                False,
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return NoReply(f"no connection ({_said(error)}). Check base_url, and that the server runs.", True)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return NoReply(f"the connection was cut ({_said(error)}). See the server's own log.", True)
        except httpx.HTTPError as error:
            return NoReply(f"the answer is no HTTP that can be read ({_said(error)}). Check base_url.", False)
        found = answer.headers
        return Reply(
            answer.status_code, answer.content, found.get("content-type"), found.get("retry-after"), found.get("date")
        )

    def close(self) -> None:
        """Take back what is on its way and close all connections; a second call does nothing."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


class _Worker:
    """A thread with an event loop, and the client whose connections live in it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.pid = os.getpid()
        self.client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
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
        """End the thread, once; in a forked process there is none, and the connections are the parent's."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # it is when the garbage collector runs there
            self._thread.join()
