"""The process of the check worker: started when it is first needed, and replaced when it has ended or is silent.

It belongs to the process that started it; a forked process starts its own. It ends, and leaves nothing behind, when it
is closed, when nothing refers to it any more, and when its owner ends in any way (`tbx_envs.thinkingbox.supervision`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.errors import CheckFault
from tbx_envs.handed_down import handed_down, hide_environment
from tbx_envs.thinkingbox.supervision import children
from tbx_envs.thinkingbox.supervision.program import Program

_PROGRAM = Path(__file__).parent / "worker"
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


class WorkerProcess:
    """The check worker's process (see the module).

    Args:
        cpu_s, memory_bytes: limits of the child of a grade.
        paths: folders to import fixtures from, in addition to those of this interpreter.
    """

    def __init__(self, *, cpu_s: int, memory_bytes: int, paths: Sequence[str | Path]) -> None:
        self._settings = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "paths": [str(path) for path in paths]}
        self._running: _Running | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def connect(self) -> Connection:
        """A connection to a new child.

        Raises:
            CheckFault: the worker does not start.
        """
        ours, its = socket.socketpair()
        try:
            with its:
                running = self._hand_over(its)
        except BaseException:
            ours.close()
            raise
        return Connection(ours, lambda: self._replace(running))

    def _replace(self, silent: _Running) -> None:
        """End a run of the program that does not answer; the next grade starts another."""
        with self._lock:
            silent.kill()
            if self._running is silent:
                self._running = None

    def _hand_over(self, sock: socket.socket) -> _Running:
        if self._owner != os.getpid():  # forked: the lock may be held by a thread of the parent
            self._lock, self._running, self._owner = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._running is not None and self._running.hand_over(sock):
                return self._running
            self._end()
            self._running = _Running(self._settings)
            if not self._running.hand_over(sock):
                raise CheckFault(f"the check worker ended at once: {self._running.last_words()}")
            return self._running

    def close(self) -> None:
        """End the worker and all grades; it is started again when it is needed."""
        if self._owner == os.getpid():
            with self._lock:
                self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    @property
    def pid(self) -> int | None:
        """Id of the running worker's process; None when none is running."""
        return None if self._running is None else self._running.program.pid


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """The way to the child of one grade.

    Attributes:
        sock: socket to it; closing it ends the child.
        replace_worker: function to call when the worker does not answer any more: it is ended, with all grades.
    """

    sock: socket.socket
    replace_worker: Callable[[], None]


class _Running:
    """One run of the program."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.folder = tempfile.mkdtemp(prefix="tbx-check-")
        self._log = os.path.join(self.folder, "worker.log")
        hide_environment()
        given = json.dumps({**settings, "folder": self.folder, "children": children.__file__})
        with open(self._log, "wb") as log:
            self.program = Program(
                lambda control: [sys.executable, str(_PROGRAM), str(control), given],
                cwd=self.folder,
                env={"PYTHONHASHSEED": "0", **handed_down()},
                stdout=log,
                stderr=log,
            )
        self.control = self.program.control
        self.end = weakref.finalize(self, _end, self.program, self.folder, os.getpid())
        self._wait_until_ready()

    def kill(self) -> None:
        """End it at once, with what it has started: it does not obey any more."""
        self.program.kill()
        self.end()

    def _wait_until_ready(self) -> None:
        self.control.settimeout(_START_TIMEOUT_S)
        try:
            problem = "" if self.control.recv(1) else "ended at once"
        except TimeoutError:
            problem = f"was not ready within {_START_TIMEOUT_S:g} s"
        if problem:
            words = self.last_words()
            self.end()
            raise CheckFault(f"the check worker ({sys.executable} {_PROGRAM}) {problem}: {words}")
        self.control.settimeout(None)

    def hand_over(self, sock: socket.socket) -> bool:
        """Give the worker its end of a new grade's socket; False when the worker has ended."""
        try:
            socket.send_fds(self.control, [b"g"], [sock.fileno()])
        except OSError:
            return False
        return True

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            return Path(self._log).read_text(encoding="utf-8", errors="replace")[-2000:].strip() or "it said nothing"
        return "it said nothing"


def _end(program: Program, folder: str, owner: int) -> None:
    if owner != os.getpid():  # a forked copy: the worker belongs to the parent
        program.forget()
        return
    program.hang_up()
    program.wait(_END_TIMEOUT_S)
    shutil.rmtree(folder, ignore_errors=True)
