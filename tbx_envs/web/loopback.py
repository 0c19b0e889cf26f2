"""Serves a web application: in a thread until it is closed, or in the foreground until it is stopped.

The port is bound before anything else happens, so that a port in use is a separate error and port 0 is resolved.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from tbx_envs.errors import ConfigError
from tbx_envs.web import addresses

# How long idle connections stay open; longer than clients usually keep them, so that none is cut while in use.
_KEEP_ALIVE_S = 75
# How long requests in progress may take once the server is told to stop.
_LAST_REQUESTS_S = 1


def bind(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the address does not exist on this machine, or the port is in use.
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
    """URL of a listening socket."""
    return addresses.url(*listener.getsockname()[:2])


@contextlib.contextmanager
def in_thread(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve an ASGI application from a thread; yields its URL. On exit, application and thread have ended.

    Raises:
        ConfigError: the port cannot be bound (`bind`).
        RuntimeError: the application did not start; see its own log.
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


def until_stopped(app: ASGIApp, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serve an ASGI application in the foreground until SIGINT or SIGTERM.

    Args:
        app: application to serve.
        listener: socket from `bind`.
        started: callback for the moment when requests are answered.

    Raises:
        RuntimeError: the application did not start; see its own log.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # After ending the application, uvicorn raises the signal again, which must not end the process.
    kept = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    server = _Server(app, started)
    try:
        with contextlib.suppress(SystemExit), listener:  # uvicorn exits when the application did not start
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if not server.started:
        raise RuntimeError("the application did not start")


class _Server(uvicorn.Server):
    """A server that reports when it has started."""

    def __init__(self, app: ASGIApp, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",  # not uvloop where it is installed; older versions set it for the whole process
                log_config=None,  # the program configures logging; uvicorn would add its own handlers
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
        """Run in a thread; `waited_for` is set once the server has started, and also when it ends."""
        try:
            with contextlib.suppress(SystemExit), listener:
                self.run(sockets=[listener])
        finally:
            waited_for.set()
