"""A program of ours that starts processes on request: the fork server of a server, and the check worker.

It ends, and with it everything that it started, when its control socket is closed, which happens when its owner ends in
any way. A program that was killed, or that no longer answers and is killed for that, cannot clear up any more. So all
of its processes inherit a mark in their environment, and its owner ends what still has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tbx_envs.thinkingbox.supervision import children

MARK = "TBX_PROGRAM"
# A program answers a request within this time unless it is stopped or stuck: it forks and waits, nothing else.
SILENCE_S = 30.0
_BETWEEN_SWEEPS_S = 0.01
_NUM_SWEEPS = 10  # what is ended may just be starting a process


class Program:
    """A running program.

    Args:
        command: makes the command line, given the descriptor of the program's end of the control socket.
        cwd: its working folder; None takes this process's.
        env: its environment, to which the mark is added.
        stdout, stderr: files or descriptors of its outputs.

    Attributes:
        control: our end of the control socket.
        pid: id of its process.

    Raises:
        OSError: the command cannot be run.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        cwd: str | None,
        env: Mapping[str, str],
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._swept = False
        self.control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=[theirs.fileno()],
                    cwd=cwd,
                    env={**env, MARK: self._mark},
                    start_new_session=True,  # an interrupt typed in a terminal is for this process alone
                )
        except BaseException:
            self.control.close()
            raise
        self.pid = self._process.pid

    def hang_up(self) -> None:
        """Close the control socket, upon which the program ends all of its processes and itself."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # takes effect even if a forked process has a copy of the socket
        self.control.close()

    def has_ended(self) -> bool:
        """Whether the program has ended; the processes that one left which could not clear up are ended, too."""
        if self._process.poll() is None:
            return False
        if self._process.returncode != 0 and not self._swept:
            self._swept = True
            self._sweep()
        return True

    def wait(self, limit_s: float) -> None:
        """Wait until it has ended; it is killed after `limit_s`."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self.has_ended()

    def kill(self) -> None:
        """Kill it, without a chance to clear up; `has_ended` does that."""
        self._process.kill()

    def forget(self) -> None:
        """In a forked child: close our end; the program belongs to the parent, which waits for it."""
        if self.control.fileno() >= 0:
            os.close(self.control.detach())
        self._process.returncode = 0

    def _sweep(self) -> None:
        """End what has the mark. Looked for until nothing is found twice: in `exec` a process shows no environment."""
        quiet = 0
        for _ in range(_NUM_SWEEPS):
            left = _marked(self._mark)
            for pid in left:
                children.kill(pid)
            quiet = 0 if left else quiet + 1
            if quiet == 2:
                return
            time.sleep(_BETWEEN_SWEEPS_S)


def _marked(mark: str) -> set[int]:
    """Ids of the living processes that have the mark in their environment; empty where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in os.listdir("/proc") if sys.platform == "linux" else ():
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:  # of others, or just gone
                if wanted in file.read().split(b"\0"):
                    found.add(int(entry))
    return found
