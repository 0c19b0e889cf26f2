"""A web application on a port: in a thread until it is closed, or in the foreground until somebody stops it.

The port is bound before anything else happens, so that a taken one is an error of its own and port 0 is known.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from tbx_envs.errors import ConfigError
from tbx_envs.web import addresses

# Connections that clients keep open; longer than they use to keep them, so that none is cut while it is used.
_KEEP_ALIVE_S = 75
# How long requests in progress may go on once the server is told to stop.
_LAST_REQUESTS_S = 1


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and listens; port 0 takes a free one.

    Raises:
        ConfigError: the address does not exist here, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another address or port (0 takes a "
            f"free one)."
        ) from error


def url_of(listener: socket.socket) -> str:
    return addresses.url(*listener.getsockname()[:2])


@contextlib.contextmanager
def in_thread(app: Any, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serves an ASGI application from a thread; yields its URL. On leaving, application and thread have ended.

    Raises:
        ConfigError: see `bind`.
        RuntimeError: the application did not start; its own log says why.
    """
    listener = bind(host, port)
    url = url_of(listener)
    started = threading.Event()
    server = _Server(app, started.set)
    thread = threading.Thread(target=server.run_and_release, args=(listener, started), name="tbx-serve", daemon=True)
    thread.start()
    started.wait()
    try:
        if not server.started:
            raise RuntimeError(f"the application did not start on {url}")
        yield url
    finally:
        server.should_exit = True
        thread.join()


def until_stopped(app: Any, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serves in the foreground until SIGINT or SIGTERM; `started` is called when requests are answered.

    Raises:
        RuntimeError: the application did not start; its own log says why.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # Once it has ended the application, uvicorn raises the signal again: it must not end the process then.
    kept = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    server = _Server(app, started)
    try:
        with contextlib.suppress(SystemExit), listener:  # uvicorn's way to say that the application did not start
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if not server.started:
        raise RuntimeError("the application did not start")


class _Server(uvicorn.Server):
    """Says when it has started."""

    def __init__(self, app: Any, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # logging is the program's; uvicorn would set up handlers of its own
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_REQUESTS_S,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def run_and_release(self, listener: socket.socket, waited_for: threading.Event) -> None:
        """For a thread: whoever waits for the start is let go whatever happens."""
        try:
            with contextlib.suppress(SystemExit), listener:
                self.run(sockets=[listener])
        finally:
            waited_for.set()
