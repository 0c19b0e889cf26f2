"""Nothing is left behind: no process, no descriptor, no thread, whatever ends a session, a pool or the program."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import uuid

import pytest

from tbx_envs.errors import ToolFault
from tbx_envs.thinkingbox.servers.server_pool import ServerPool

WAYS = ("close", "discard", "forget", "kill", "die", "hang", "garbage", "exit_zero", "kill_fork_server")


@pytest.fixture
def marked(trouble_with):
    """The server `trouble` with a mark in its environment that all its processes inherit, and a way to find them."""
    mark = f"mark-{uuid.uuid4()}"
    server = trouble_with()
    server.env["BIKESHOP_MARK"] = mark
    return server, lambda: processes_of(mark)


def processes_of(mark):
    """Ids of the living processes whose command line or environment holds `mark`."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as command, open(f"/proc/{entry}/environ", "rb") as environment:
                told = command.read() + environment.read()
            with open(f"/proc/{entry}/stat") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in told and state != "Z" and int(entry) != os.getpid():
            found.add(int(entry))
    return found


def wait_until(find, count):
    """Until `find` finds so many; a process that was just started shows its environment a moment later."""
    for _ in range(1000):
        if len(found := find()) == count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{found} after 10 s, wanted {count}")


def descriptors():
    return sorted(os.readlink(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd") if _is_there(entry))


def _is_there(entry):
    return os.path.lexists(f"/proc/self/fd/{entry}")


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def end(session, way):
    """End a session in one of `WAYS`."""
    pid = session.call_reserved("trouble", "look", {})["pid"]
    match way:
        case "close":
            session.close()
        case "discard":
            session.discard()
        case "kill":
            os.kill(pid, signal.SIGKILL)
            session.close()
        case "kill_fork_server":
            os.kill(parent_of(pid), signal.SIGKILL)
        case "forget":
            pass
        case _:
            with pytest.raises(ToolFault):
                session.call(way, {}, timeout_s=0.05 if way == "hang" else 30)


def live_and_die(server, find, number_of_sessions, seed):
    """Sessions in four threads, each ended in a way drawn at random; then the pool is closed."""
    draw = random.Random(seed)
    ways = [draw.choices(WAYS, weights=[8, 4, 4, 4, 4, 1, 4, 4, 0.3])[0] for _ in range(number_of_sessions)]
    pool = ServerPool({"trouble": server}, knowledge=False, call_timeout_s=30)
    failures = []

    def work(mine):
        for way in mine:
            try:
                end(pool.open({}, servers=["trouble"]), way)
            except ToolFault:  # another thread killed the fork server under this session
                continue
            except BaseException as error:
                failures.append((way, error))

    threads = [threading.Thread(target=work, args=(ways[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(find()) <= 1 + 2 * 4  # the fork server, and sessions that are just ending
    pool.close()
    assert find() == set()


def test_sessions_that_end_in_every_way_leave_nothing(marked):
    server, find = marked
    live_and_die(server, find, 20, seed=0)  # whatever is made once by then is made
    before, threads = descriptors(), set(threading.enumerate())
    live_and_die(server, find, 480, seed=1)
    assert descriptors() == before
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_closing_a_pool_ends_what_is_still_open(marked, start):
    server, find = marked
    pool = ServerPool({"trouble": server}, start=start, knowledge=False)
    sessions = [pool.open({"trouble": {"teardown": "hang_deaf"}}, servers=["trouble"]) for _ in range(3)]
    wait_until(find, 3 + 1)  # and the program that starts them
    pool.close()
    assert find() == set()
    del sessions


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_that_a_server_left_behind_end_with_it(marked, start):
    server, find = marked
    with ServerPool({"trouble": server}, start=start, knowledge=False) as pool:
        session = pool.open({}, servers=["trouble"])
        session.call("leave_processes", {})
        wait_until(find, 3 + 1)  # and the program that starts them
        session.close()
        wait_until(find, 1)
        pool.open({}, servers=["trouble"]).call("leave_processes", {})
    assert find() == set()


def test_a_session_that_is_forgotten_ends(marked):
    server, find = marked
    with ServerPool({"trouble": server}, knowledge=False) as pool:
        session = pool.open({}, servers=["trouble"])
        wait_until(find, 2)
        del session
        wait_until(find, 1)


def test_a_pool_that_is_forgotten_ends(marked):
    server, find = marked
    pool = ServerPool({"trouble": server}, knowledge=False)
    pool.open({}, servers=["trouble"]).close()
    del pool
    wait_until(find, 0)


def test_a_server_that_is_slow_to_import_is_ended_with_the_pool(trouble_with, marked):
    server, find = marked
    server.env["BIKESHOP_TROUBLE"] = "import_hang"
    pool = ServerPool({"trouble": server}, knowledge=False)
    faults = []

    def open_in_vain():
        try:
            pool.open({}, servers=["trouble"])
        except ToolFault as fault:
            faults.append(str(fault))

    opener = threading.Thread(target=open_in_vain)
    opener.start()
    wait_until(find, 1)
    pool.close()
    opener.join()
    assert find() == set() and len(faults) == 1


UNTIL_KILLED = """
import os, sys
sys.path[:0] = {path!r}
from tbx_envs.thinkingbox.servers.servers_file import ProcessServer
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
environ = dict(os.environ)
server = ProcessServer("trouble", {command!r}, {env!r}, {cwd!r}, sys.executable, environ)
pool = ServerPool({{"trouble": server}}, start={start!r}, knowledge=False)
sessions = [pool.open({{}}, servers=["trouble"]) for _ in range(2)]
sessions[0].call("leave_processes", {{}})
print("ready", flush=True)
sessions[1].call({call!r}, {{}})
"""


@pytest.mark.parametrize(("start", "call"), [("fork", "spin"), ("spawn", "hang_deaf")])
def test_nothing_outlives_a_program_that_is_killed(marked, start, call):
    server, find = marked
    program = UNTIL_KILLED.format(
        path=sys.path, command=server.command, env=server.env, cwd=server.cwd, start=start, call=call
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "ready\n"
        wait_until(find, 2 + 2 + 2)  # the program itself, what starts processes, sessions, and what they left
        running.kill()
        running.wait()
    wait_until(find, 0)
