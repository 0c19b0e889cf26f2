"""The fork server of checks: everything that tests import is loaded once, and each grade runs in a forked child.

The control socket delivers sockets, one for each grade. The child communicates over its socket; the server keeps a
copy, to report how the child ended. Closing the other end of a grade's socket ends the grade. A grade ends with all
processes that its test has started, also those that left its process group. The server ends, and with it every child,
when the control socket is closed or the process that started it has ended (`tbx_envs.thinkingbox.supervision`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import itertools
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import traceback
from types import ModuleType
from typing import Any, NoReturn

from .frames import frame

_LOOK_AT_PARENT_MS = 1000
_END_S = 2.0  # for killed processes to end
_HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
_LAST_WORDS = ".stderr"
_NUM_LAST_BYTES = 2000


def main() -> None:
    """Serve until the control socket is closed. Arguments: its descriptor, settings as JSON."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    sys.path.extend(settings["paths"])
    children = _load(settings["children"])
    children.adopt_orphans()
    _preload()
    control.set_inheritable(False)
    control.sendall(b"\n")
    ForkServer(control, settings, children).serve()


def _load(path: str) -> ModuleType:
    """The module of a file of tbx that is in no folder of this program's path."""
    spec = importlib.util.spec_from_file_location("_tbx_children", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _preload() -> None:
    """Import what tests import, so that no grade has to; all children share what is loaded now."""
    for name in ("collections", "copy", "datetime", "decimal", "re", "thinkingbox.common.rubrics_judge"):
        importlib.import_module(name)
    importlib.import_module(".running", __package__)
    gc.collect()
    gc.freeze()


class _Grade:
    """A running child: its process, the server's copy of its socket, its working folder."""

    def __init__(self, pid: int, sock: socket.socket, folder: str) -> None:
        self.pid, self.sock, self.folder = pid, sock, folder


class ForkServer:
    """The server (see the module).

    Args:
        control: control socket.
        settings: `folder` for the working folders; `memory_bytes` and `cpu_s`, the limits of a child.
        children: the module `tbx_envs.thinkingbox.supervision.children`.
    """

    def __init__(self, control: socket.socket, settings: dict[str, Any], children: ModuleType) -> None:
        self._control = control
        self._settings = settings
        self._children = children
        self._parent, self._pid = os.getppid(), os.getpid()
        self._folders = (os.path.join(settings["folder"], str(number)) for number in itertools.count())
        self._grades: dict[int, _Grade] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._children_ended, wake = socket.socketpair()
        for end in (self._children_ended, wake):
            end.setblocking(False)
        self._wake = wake
        self._poll.register(self._children_ended, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Start and end grades until the control socket is closed or the parent has ended."""
        try:
            while os.getppid() == self._parent and self._turn():
                pass
        finally:
            self._children.end_all(self._pids(), _END_S)
            shutil.rmtree(self._settings["folder"], ignore_errors=True)

    def _turn(self) -> bool:
        """Handle the next events; False when the control socket is closed.

        Hang-ups come first and new grades last: a new grade's socket may get the descriptor of one that is closed here.
        """
        happened = {descriptor for descriptor, _ in self._poll.poll(_LOOK_AT_PARENT_MS)}
        for descriptor in happened & self._grades.keys():  # no one waits for these any more
            self._poll.unregister(descriptor)
            self._children.kill(self._grades[descriptor].pid)
        if self._children_ended.fileno() in happened:
            self._children_ended.recv(4096)
            self._collect_ended()
        return self._control.fileno() not in happened or self._begin_grades()

    def _begin_grades(self) -> bool:
        said, descriptors, _, _ = socket.recv_fds(self._control, 64, 64)
        for descriptor in descriptors:
            self._begin(socket.socket(fileno=descriptor))
        return bool(said)

    def _begin(self, sock: socket.socket) -> None:
        sock.set_inheritable(False)
        folder = next(self._folders)
        try:
            os.mkdir(folder)
            pid = os.fork()
        except OSError as error:  # no memory, no space, too many processes: only this grade has no child
            with contextlib.suppress(OSError):
                sock.sendall(frame({"ended": f"no child: {error}"}))
            sock.close()
            return
        if pid == 0:
            self._be_child(sock, folder)
        self._grades[sock.fileno()] = _Grade(pid, sock, folder)
        self._poll.register(sock, _HUNG_UP)

    def _be_child(self, sock: socket.socket, folder: str) -> NoReturn:
        """Never returns and never unwinds into the server's frames."""
        code = 1
        try:
            self._children.begin(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._control, self._children_ended, self._wake, *(g.sock for g in self._grades.values())):
                other.close()
            _write_last_words_to(folder + _LAST_WORDS)
            os.chdir(folder)
            _limit(self._settings)
            from .running import run

            run(sock)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            sys.__stderr__.flush()
        finally:
            os._exit(code)

    def _pids(self) -> set[int]:
        return {grade.pid for grade in self._grades.values()}

    def _collect_ended(self) -> None:
        ended = dict(self._children.take_ended())
        over = [(descriptor, grade) for descriptor, grade in self._grades.items() if grade.pid in ended]
        for descriptor, _ in over:
            del self._grades[descriptor]
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
        self._children.kill_left(self._pids())  # before anyone is told that the grade has ended
        for _, grade in over:
            self._report(grade, _how(ended[grade.pid]))

    def _report(self, grade: _Grade, how: str) -> None:
        """Say how a grade's child ended, and forget the grade."""
        message = frame({"ended": how, "last_words": _take_last_words(grade.folder + _LAST_WORDS)})
        shutil.rmtree(grade.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the other end may be closed
            grade.sock.send(message, socket.MSG_DONTWAIT)
        grade.sock.close()


def _how(status: int) -> str:
    """How a process ended, for people, given its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _write_last_words_to(path: str) -> None:
    """Redirect the messages of a crash to a file, so that nothing goes to the server's own outputs."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()


def _take_last_words(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _NUM_LAST_BYTES))
            words = file.read().decode(errors="replace")
        os.unlink(path)
    except FileNotFoundError:  # the child ended before it created the file
        return ""
    return words


def _limit(settings: dict[str, Any]) -> None:
    memory, seconds = settings["memory_bytes"], settings["cpu_s"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
