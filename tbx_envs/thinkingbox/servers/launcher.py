"""Starts the processes of one server's sessions, through a separate program (`fork_server`) that ends with this one.

Everything here runs in the thread of one event loop. The program is one under supervision
(`tbx_envs.thinkingbox.supervision`); one that no longer answers is replaced. With `fork` it imports the server once and
forks it for each session; with `spawn` it runs the server's command for each session. A server that cannot be forked is
spawned, and a log line says why. Both give a process a socket as stdin and stdout, and a pipe as stderr.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

from tbx_envs.errors import ConfigError, ToolFault
from tbx_envs.handed_down import hide_environment, missing_hint
from tbx_envs.thinkingbox.servers.foreign_tools import Listing
from tbx_envs.thinkingbox.servers.server_clock import REQUIREMENT
from tbx_envs.thinkingbox.servers.servers_file import ProcessServer
from tbx_envs.thinkingbox.supervision import children
from tbx_envs.thinkingbox.supervision.program import SILENCE_S, Program

logger = logging.getLogger(__name__)

Start = Literal["fork", "spawn"]
PROGRAM = Path(__file__).with_name("fork_server.py")

_TAIL_BYTES = 4000  # length of the end of stderr that is kept
_END_S = 3.0  # for the program to end once its control socket is closed
_IMPORT_S = 600.0  # for a server to be imported; sessions that wait for it have a limit of their own
_PLAIN_OPTIONS = frozenset("bBdEIOPqsSuv")  # options of the interpreter that take no argument


@dataclasses.dataclass(frozen=True, slots=True)
class ClockSetting:
    """The clock of a session's processes.

    Attributes:
        moment_ns: moment that it shows, in nanoseconds since 1970 (UTC).
        runs: whether it runs from that moment; otherwise it stands still.
    """

    moment_ns: int
    runs: bool


class ErrorTail:
    """The end of what a process wrote to stderr, read as it arrives, so that the process never blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._loop, self._descriptor, self._tail = loop, descriptor, b""
        loop.add_reader(descriptor, self._read)

    @property
    def text(self) -> str:
        if self._descriptor >= 0:
            self._read()
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._read()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def forget(self) -> None:
        """Close the descriptor in a forked child, without touching the loop."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if not data:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


@dataclasses.dataclass(slots=True, eq=False)
class ServerProcess:
    """A process that serves one session.

    Attributes:
        pid: id of the process and of its process group.
        link: our end of its stdin and stdout.
        errors: end of its stderr.
        ended: wait status, once it has ended; None if its launcher ended first.
        launcher: launcher that started it.
    """

    pid: int
    link: socket.socket
    errors: ErrorTail
    ended: asyncio.Future[int | None]
    launcher: Launcher

    def kill(self) -> None:
        """Kill it and its process group; `ended` is set once it has ended."""
        self.launcher.kill(self.pid)

    def forget(self) -> None:
        """Close the descriptors in a forked child."""
        if self.link.fileno() >= 0:
            os.close(self.link.detach())
        self.errors.forget()

    def describe_end(self) -> str:
        """How it ended, for people."""
        status = self.ended.result() if self.ended.done() else None
        if status is None:
            return "its process is gone"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"its process ended with status {code}"
        return f"its process was killed by {signal.Signals(-code).name}"


class Launcher:
    """The processes of one server.

    Attributes:
        server: the server.
        how: how processes are started; `fork` changes to `spawn` when the server cannot be forked.
        listings: clock -> listing of the server's tools; forks of one image list the same tools, so one is asked.
    """

    def __init__(self, server: ProcessServer, how: Start) -> None:
        self.server = server
        self.how: Start = how
        self.listings: dict[ClockSetting | None, Listing] = {}
        self._loop = asyncio.get_running_loop()
        self._program: _Program | None = None
        self._starting: asyncio.Task[_Program] | None = None

    async def start_process(self, clock: ClockSetting | None) -> ServerProcess:
        """A new process of the server.

        Raises:
            ToolFault: the server cannot be imported, or no process could be created.
            ConfigError: its command cannot be run, or its module does not exist.
        """
        try:
            return await self._start_process(clock)
        except _Silent as silence:  # it cannot have started anything that is known to anyone: ask another program
            logger.warning("server '%s': %s", self.server.name, silence)
            return await self._start_process(clock)

    async def _start_process(self, clock: ClockSetting | None) -> ServerProcess:
        program = await self._running_program()
        if self.how == "fork":
            return await program.start(self, {"clock": None if clock is None else dataclasses.asdict(clock)})
        return await program.start(self, {"command": _spawn_command(self.server, clock)})

    async def permanent_error(self, clock: ClockSetting | None) -> ConfigError | None:
        """Why a process that ended before it wrote anything can never start: no such server, or no settable clock.

        The server's own interpreter is asked, since its message on stderr is not a protocol. None when there is no such
        reason, and for a forked server without a clock, where the import has checked already.
        """
        python = python_program(self.server)
        if python is None or (self.how == "fork" and clock is None):
            return None
        try:
            program = _Program(self.server, [python.interpreter, *python.options], {**python.config, "look": True})
        except ConfigError as error:
            return error
        try:
            ready = await program.ready
        except ToolFault:
            return None
        finally:
            await program.close()
        if ready.get("missing"):
            return _not_found(self.server, python, ready["why"])
        return _no_clock(self.server, python, ready["no_clock"]) if clock is not None and ready["no_clock"] else None

    def kill(self, pid: int) -> None:
        if self._program is not None:
            self._program.kill(pid)

    async def close(self) -> None:
        """End the program and all its processes."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._program is not None:
            await self._program.close()

    def forget(self) -> None:
        """Close all descriptors in a forked child."""
        if self._program is not None:
            self._program.forget()

    async def _running_program(self) -> _Program:
        """The program, started by the first call, and again when it has ended."""
        if self._program is not None and self._program.gone:
            await self._program.close()
            self._program = None
        if self._program is None:
            if self._starting is None:
                self._starting = self._loop.create_task(self._start_program())
                self._starting.add_done_callback(self._started)
            await asyncio.shield(self._starting)
        assert self._program is not None
        return self._program

    def _started(self, task: asyncio.Task[_Program]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is None:
            self._program = task.result()

    async def _start_program(self) -> _Program:
        python = python_program(self.server) if self.how == "fork" else None
        if self.how == "fork" and python is None:
            self._fall_back("its command is not a Python module or script")
        if self.how == "fork":
            assert python is not None
            program = _Program(self.server, [python.interpreter, *python.options], python.config)
        else:
            program = _Program(self.server, [sys.executable, "-I", "-S"], {})
        try:
            async with asyncio.timeout(_IMPORT_S):
                ready = await program.ready
        except TimeoutError:
            await program.close()
            raise ToolFault(f"server '{self.server.name}' cannot start: not imported after {_IMPORT_S:g} s.") from None
        except BaseException:
            await program.close()
            raise
        if ready["ready"] == "no":
            await program.close()
            if ready.get("missing"):
                assert python is not None
                raise _not_found(self.server, python, ready["why"])
            hint = missing_hint(ready["why"], self.server.environ)
            raise ToolFault(f"server '{self.server.name}' cannot start: {ready['why']}{hint}")
        if self.how == "fork" and ready["ready"] == "run":
            await program.close()
            self._fall_back(ready["why"])
            return await self._start_program()
        return program

    def _fall_back(self, why: str) -> None:
        logger.warning("server '%s' is spawned for each session, not forked: %s", self.server.name, why)
        self.how = "spawn"


class _Silent(ToolFault):
    """A program did not answer a request; it has been killed."""


class _Program:
    """A running `fork_server`.

    Attributes:
        ready: its first message.
        gone: True once its control socket is closed.
    """

    def __init__(self, server: ProcessServer, interpreter: list[str], config: Mapping[str, Any]) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.gone = False
        self._listens = False
        self._asked: dict[int, asyncio.Future[tuple[int, asyncio.Future[int | None]]]] = {}
        self._live: dict[int, asyncio.Future[int | None]] = {}
        self._number = 0
        self._buffer = b""
        self._program, self._errors = self._run(interpreter, config)
        self._control = self._program.control
        self._loop.add_reader(self._control.fileno(), self._receive)

    def _run(self, interpreter: list[str], config: Mapping[str, Any]) -> tuple[Program, ErrorTail]:
        errors_read, errors_write = os.pipe()
        hide_environment()
        try:
            with _printed_file() as printed:
                program = Program(
                    lambda control: [*interpreter, str(PROGRAM), "serve", str(control), json.dumps(config)],
                    cwd=self._server.cwd,
                    env=self._server.environment(),
                    stdout=printed,
                    stderr=errors_write,
                )
        except OSError as error:
            os.close(errors_read)
            raise ConfigError(
                f"server '{self._server.name}' cannot be started with {interpreter[0]} in "
                f"{self._server.cwd or os.getcwd()}: {error}. Correct its command or cwd in servers.yaml, or the "
                f"interpreter of the servers."
            ) from error
        finally:
            os.close(errors_write)
        program.control.setblocking(False)
        return program, ErrorTail(self._loop, errors_read)

    async def start(self, launcher: Launcher, request: Mapping[str, Any]) -> ServerProcess:
        self._number += 1
        number = self._number
        answer = self._asked[number] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        errors_read, errors_write = os.pipe()
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._send({"start": number, **request}, [theirs.fileno(), errors_write])
                pid, ended = await answer
        except TimeoutError:
            ours.close()
            os.close(errors_read)
            raise self._silenced() from None
        except BaseException:
            ours.close()
            os.close(errors_read)
            raise
        finally:
            self._asked.pop(number, None)  # a process that starts nevertheless is killed when it is reported
            theirs.close()
            os.close(errors_write)
        ours.setblocking(False)
        return ServerProcess(pid, ours, ErrorTail(self._loop, errors_read), ended, launcher)

    def kill(self, pid: int) -> None:
        if pid not in self._live:
            return
        try:
            self._control.send(json.dumps({"kill": pid}).encode() + b"\n")
        except OSError:  # the program has ended or is too busy; `pid` has not been reaped, or only a moment ago
            children.kill(pid)

    def _silenced(self) -> _Silent:
        """Kill the program, which does not answer: its sessions are void."""
        self._program.kill()
        self._lose(why := f"its program did not answer within {SILENCE_S:g} s and was killed")
        return _Silent(f"server '{self._server.name}' cannot start: {why}.")

    async def close(self) -> None:
        """End the program; all its processes have ended afterwards."""
        if not self._listens or self.gone:  # it may be in the middle of an import
            self._program.kill()
        self._lose("it was closed")
        deadline = self._loop.time() + _END_S
        while not self._program.has_ended():
            if self._loop.time() > deadline:
                self._program.kill()
            await asyncio.sleep(0.002)
        self._errors.close()

    def forget(self) -> None:
        self._program.forget()
        self._errors.forget()

    async def _send(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while True:
            try:
                socket.send_fds(self._control, [data], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                self._lose("its program is gone")
                raise self._fault("its program is gone") from error

    def _receive(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("its program ended")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._listens = True
            if not self.ready.done():
                self.ready.set_result(message)
        elif "started" in message:
            ended = self._live[message["pid"]] = self._loop.create_future()
            answer = self._asked.get(message["started"])
            if answer is None or answer.done():  # no one waits for it any more
                self.kill(message["pid"])
            else:
                answer.set_result((message["pid"], ended))  # it may end before the caller looks at it
        elif "failed" in message:
            answer = self._asked.get(message["failed"])
            if answer is not None and not answer.done():
                answer.set_exception(self._fault(message["why"]))
        elif message.get("ended") in self._live:
            ended = self._live.pop(message["ended"])
            if not ended.done():
                ended.set_result(message["status"])

    def _lose(self, why: str) -> None:
        """The control socket is closed: every process started through it has ended, or ends at once."""
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control.fileno())
        self._program.hang_up()
        for pid, ended in self._live.items():
            children.kill(pid)
            if not ended.done():
                ended.set_result(None)
        self._live.clear()
        waiting: list[asyncio.Future[Any]] = [self.ready, *self._asked.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(self._fault(why))
                future.exception()  # marks it as retrieved: it is fine if no one waits for it

    def _fault(self, why: str) -> ToolFault:
        tail = self._errors.text
        hint = missing_hint(f"{why} {tail}", self._server.environ)
        return ToolFault(f"server '{self._server.name}' cannot start: {why}" + (f"\n{tail}" if tail else "") + hint)


# --- commands -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PythonProgram:
    """A command that runs a Python module or script.

    Attributes:
        interpreter: path or name of the interpreter.
        options: options of the interpreter.
        config: configuration for `fork_server`: `module` or `script`, and `args`.
    """

    interpreter: str
    options: tuple[str, ...]
    config: Mapping[str, Any]


def python_program(server: ProcessServer) -> PythonProgram | None:
    """The server's command, if it runs a Python module (`-m`) or script.

    Raises:
        ConfigError: its placeholders cannot be filled.
    """
    interpreter, *rest = server.command_line()
    if interpreter != server.python and not re.fullmatch(r"python(\d+(\.\d+)*)?(\.exe)?", Path(interpreter).name):
        return None
    options: list[str] = []
    while rest:
        part = rest.pop(0)
        if part == "-m" and rest:
            return PythonProgram(interpreter, tuple(options), {"module": rest[0], "args": rest[1:]})
        if part in ("-W", "-X") and rest:
            options += [part, rest.pop(0)]
        elif part.startswith(("-W", "-X")) or (part[:1] == "-" and part[1:] and set(part[1:]) <= _PLAIN_OPTIONS):
            options.append(part)
        elif part.startswith("-"):
            return None
        else:
            script = os.path.join(server.cwd or os.getcwd(), part)
            return PythonProgram(interpreter, tuple(options), {"script": script, "args": rest})
    return None


def _not_found(server: ProcessServer, python: PythonProgram, why: str) -> ConfigError:
    """The error of a server that its interpreter does not find, which retrying cannot fix."""
    if "script" in python.config:
        what, remedy = "its script", "Correct its command or cwd in servers.yaml."
    elif python.interpreter != server.python:
        what = f"its module '{python.config['module']}'"
        remedy = "Install the package of the servers there, or correct its command in servers.yaml."
    else:
        what = f"its module '{python.config['module']}'"
        remedy = (
            "Name an interpreter that has the packages of the servers: set TBX_SERVERS_PYTHON, or give "
            "register_dataset(..., servers_python=)."
        )
    return ConfigError(
        f"server '{server.name}' cannot start: {python.interpreter} does not find {what}. {remedy} It says: {why}"
    )


def _no_clock(server: ProcessServer, python: PythonProgram, why: str) -> ConfigError:
    """The error of an interpreter that cannot set its clock."""
    return ConfigError(
        f"the clock of server '{server.name}' cannot be set by {python.interpreter}: {why}. Run "
        f"{python.interpreter} -m pip install '{REQUIREMENT}', or give its tasks no clock."
    )


def _spawn_command(server: ProcessServer, clock: ClockSetting | None) -> list[str]:
    if clock is None:
        return server.command_line()
    program = python_program(server)
    if program is None:
        raise ConfigError(
            f"the clock of server '{server.name}' cannot be set: its command is not a Python module or script. Give "
            f"its tasks no clock, or start it with {{python}} -m."
        )
    config = {**program.config, "clock": dataclasses.asdict(clock)}
    return [program.interpreter, *program.options, str(PROGRAM), "run", json.dumps(config)]


def _printed_file() -> IO[bytes]:
    """A file for the program's stdout, which only the program itself reads, after the import."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tbx-stdout"), "wb")
    return tempfile.TemporaryFile()
