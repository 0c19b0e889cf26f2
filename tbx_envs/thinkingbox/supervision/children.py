"""The processes that one of our programs has started: they end when they are told to, with all that they started.

Standard library only (any Python from 3.10): the programs load this file by its path, where tbx is not installed.

A process that we start leads a session, so that it is killed with its whole process group. What leaves the group
(`start_new_session`, a double fork) is found by adoption: on Linux each of our processes, and the program that starts
them, is a *subreaper*, which becomes the parent of descendants whose own parent has ended. While a process of ours
lives, it adopts what it has started; when it has ended, its program does. The children of the program are therefore, at
any moment, the processes that it started and what ended ones have left, and the latter are killed when they are seen.

Other systems have no subreaper (macOS): there a process that leaves its group is not found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(dies: bool = True) -> None:
    """Get killed when the parent ends in any way. On other systems than Linux only a closed socket tells."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if dies else 0)


def begin(parent: int) -> None:
    """In a process that was just forked: lead a session, end with the program, adopt orphans of its own.

    Args:
        parent: id of the program's process.
    """
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    adopt_orphans()


def kill(pid: int) -> None:
    """Kill a process and its whole group. The process itself, too, since it may not lead its group yet."""
    for send in (os.kill, os.killpg):
        try:
            send(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def take_ended() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: id and wait status of each. What is left in their groups is killed."""
    while True:
        try:
            pid, status = _ended_child()
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _ended_child() -> tuple[int, int]:
    """Id and wait status of a child that has ended; the id is 0 when there is none."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            kill(pid)
        return pid, status
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return 0, 0
    kill(found.si_pid)  # before it is waited for: until then nothing else can have its id
    return os.waitpid(found.si_pid, 0)


def kill_left(started: Collection[int]) -> None:
    """Kill what ended processes have left: the children that the program did not start.

    Args:
        started: ids of the processes that the program has started and that have not ended.
    """
    for pid in children().difference(started):
        kill(pid)


def end_all(started: Collection[int], limit_s: float) -> None:
    """Kill all children and wait until they, and what they leave, have ended; at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    for pid in started:
        kill(pid)
    while time.monotonic() < deadline:
        kill_left(())
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
        except ChildProcessError:
            return


def children() -> set[int]:
    """Ids of the children of this process, started or adopted; empty where the kernel does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
