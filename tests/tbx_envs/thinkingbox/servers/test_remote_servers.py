"""Servers over HTTP, on loopback: streamable HTTP and server-sent events."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tbx_envs.errors import ConfigError, ToolFault
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.thinkingbox.servers.servers_file import RemoteServer


class Host:
    """A process that serves `bikeshop_servers.remote`."""

    def __init__(self, transport: str, folder: str, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "bikeshop_servers.remote", transport, str(log)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
        port = int(self.process.stdout.readline())
        path = "sse" if transport == "sse" else "mcp"
        self.server = RemoteServer("far", f"http://127.0.0.1:{port}/{path}", {"X-Shop": "bikes"}, 20.0, transport, None)

    def noted(self, kind: str) -> list[str]:
        lines = [line.split(maxsplit=1) for line in self.log.read_text().splitlines()]
        return [line[1] for line in lines if line[0] == kind]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module", params=["streamable-http", "sse"])
def transport(request):
    return request.param


@pytest.fixture
def new_host(transport, shop_servers, tmp_path):
    with contextlib.ExitStack() as stack:

        def build():
            host = Host(transport, shop_servers["trouble"].cwd, tmp_path / "log")
            stack.callback(host.kill)
            return host

        yield build


@pytest.fixture(scope="module")
def host(transport, shop_servers, tmp_path_factory):
    host = Host(transport, shop_servers["trouble"].cwd, tmp_path_factory.mktemp("remote") / "log")
    yield host
    host.kill()


@pytest.fixture
def pool(host, shop_servers):
    with ServerPool({"far": host.server, "trouble": shop_servers["trouble"]}, knowledge=False) as pool:
        yield pool


def test_a_remote_server_is_a_server_like_others(pool, host):
    session = pool.open({"far": {"data": 1}}, servers=["far", "trouble"])
    assert session.init_result == {"far": {"told": {"data": 1}}, "trouble": {}}
    assert [tool.name for tool in session.tools][:2] == ["order", "hang"]
    assert session.call("order", {"item": "tea"}).text == "ordered tea"
    assert session.call("order", {}).status == "rejected"
    assert session.call("fine", {}).text == "fine"
    assert session.effects() == {"far": {"shop": "open"}, "trouble": {}}
    session.close()
    assert host.noted("order") == ["tea"] and set(host.noted("header")) == {"bikes"}


def test_a_call_that_hangs_is_a_fault_within_its_limit(pool, host):
    session = pool.open({}, servers=["far"])
    with pytest.raises(ToolFault, match=r"server 'far' in a call of 'hang': did not answer within 0\.3 s"):
        session.call("hang", {"item": "slow"}, timeout_s=0.3)
    assert host.noted("hang").count("slow") == 1


def test_a_connection_that_breaks_is_a_fault_and_nothing_is_sent_again(new_host):
    host = new_host()
    with ServerPool({"far": host.server}, knowledge=False, call_timeout_s=10) as pool:
        session = pool.open({}, servers=["far"])
        killer = threading.Timer(0.3, host.process.kill)
        killer.start()
        with pytest.raises(ToolFault, match="server 'far' in a call of 'hang'") as fault:
            session.call("hang", {"item": "once"})
        killer.join()
        assert "did not answer" not in str(fault.value)  # it was noticed, not waited for
        assert host.noted("hang") == ["once"]
        with pytest.raises(ToolFault):
            pool.open({}, servers=["far"])


def test_a_server_that_goes_between_calls_is_a_fault_of_the_next(new_host):
    host = new_host()
    with ServerPool({"far": host.server}, knowledge=False, call_timeout_s=3) as pool:
        session = pool.open({}, servers=["far"])
        host.process.kill()
        host.process.wait()
        with pytest.raises(ToolFault, match="server 'far'"):
            session.call("order", {"item": "late"})
        assert host.noted("order") == []


def test_a_server_that_is_not_there_is_a_fault(transport):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"
        far = RemoteServer("far", endpoint, {"Authorization": "s3cret"}, 5.0, transport, None)
        pool = ServerPool({"far": far}, knowledge=False)
        with pool, pytest.raises(ToolFault, match=r"server 'far' .*: failed: ") as fault:
            pool.open({}, servers=["far"])
    assert "s3cret" not in str(fault.value)


def test_another_page_at_the_address_is_a_fault(host):
    far = RemoteServer("far", host.server.endpoint + "x", {}, 5.0, host.server.transport, None)
    with ServerPool({"far": far}, knowledge=False) as pool, pytest.raises(ToolFault, match=r"server 'far'.*Not Found"):
        pool.open({}, servers=["far"])


def test_credentials_that_cannot_be_had_are_said():
    far = RemoteServer("far", "http://127.0.0.1:9", {}, 5.0, "sse", {"type": "azure-interactive"})
    with ServerPool({"far": far}, knowledge=False) as pool, pytest.raises(ConfigError, match="'azure-interactive'"):
        pool.open({}, servers=["far"])


def test_sessions_of_remote_servers_leave_nothing(host):
    def open_and_end(pool):
        sessions = [pool.open({}, servers=["far"]) for _ in range(4)]
        for session in sessions[:2]:
            session.close()
        sessions[2].discard()

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with ServerPool({"far": host.server}, knowledge=False) as pool:
        open_and_end(pool)
    before, threads = descriptors(), set(threading.enumerate())
    with ServerPool({"far": host.server}, knowledge=False) as pool:
        open_and_end(pool)
    assert (descriptors(), set(threading.enumerate())) == (before, threads)
