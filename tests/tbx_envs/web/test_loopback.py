from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tbx_envs.endpoints import transport
from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.servers import server_pool
from tbx_envs.web import addresses, loopback


def application(ended: list[str], starts: bool = True) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if not starts:
            raise ValueError("cannot start")
        yield
        ended.append("ended")

    async def hello(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return Starlette(routes=[Route("/", hello)], lifespan=lifespan)


class Uvloop(types.ModuleType):
    """Stands in for uvloop, which JAX's checkpoints bring along: nothing of it may be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"uvloop.{name} is used")


def test_servers_and_their_clients_run_in_asyncios_own_loop_where_another_is_installed(monkeypatch: Any) -> None:
    """Under uvloop, the end of a server's process is not noticed; older uvicorns set it for the whole process."""
    monkeypatch.setitem(sys.modules, "uvloop", Uvloop("uvloop"))
    policy = asyncio.get_event_loop_policy()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: Uvloop("uvloop").new_event_loop())
    with loopback.in_thread(application([])) as url:
        assert asyncio.get_event_loop_policy() is policy
        assert httpx.get(url).text == "hello"
    worker = transport._Worker(httpx.AsyncClient())
    engine = server_pool._Engine("fork")
    for loop in (worker._loop, engine._started_loop()):
        assert type(loop) is asyncio.SelectorEventLoop
    worker.close()
    engine.close()


def test_an_application_is_served_and_ended() -> None:
    ended: list[str] = []
    before = set(threading.enumerate())
    with loopback.in_thread(application(ended)) as url:
        assert httpx.get(url).text == "hello"
        assert ended == []
    assert ended == ["ended"]
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_an_application_that_does_not_start_is_an_error_and_leaves_nothing() -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="did not start"), loopback.in_thread(application([], starts=False)):
        pass
    assert set(threading.enumerate()) <= before
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError, match="did not start"):
        loopback.until_stopped(application([], starts=False), loopback.bind("127.0.0.1", 0), lambda: None)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_taken_port_and_an_address_of_another_machine_are_errors() -> None:
    with loopback.bind("127.0.0.1", 0) as listener:
        assert loopback.url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            loopback.bind("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:80"):
        loopback.bind("192.0.2.1", 80)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_loopback() -> None:
    with loopback.in_thread(application([]), host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert httpx.get(url).text == "hello"


def test_what_is_loopback() -> None:
    assert all(map(addresses.is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(addresses.is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org", "")))


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from test_loopback import application
from tbx_envs.web import loopback
ended = []
listener = loopback.bind("127.0.0.1", 0)
loopback.until_stopped(application(ended), listener, lambda: print(loopback.url_of(listener), flush=True))
print(ended)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_a_signal_ends_the_application_and_not_the_process(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, os.path.dirname(__file__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert httpx.get(process.stdout.readline().strip()).text == "hello"
        process.send_signal(number)
        assert process.stdout.read() == "['ended']\n"
    assert process.returncode == 0
