"""Starts the processes of a server's sessions: imports the server once and forks it for each, or runs its command.

A program of the standard library only, run as a file by the servers' own interpreter (any Python from 3.10), where tbx
is not installed; only setting a clock needs a package there (`server_clock`). It is a program under supervision
(`tbx_envs.thinkingbox.supervision`):

    python fork_server.py serve FD CONFIG    obey the control socket FD (below) until it is closed
    python fork_server.py run CONFIG         be one session's process, with its clock set

CONFIG is JSON: `{"module": name} | {"script": path} | {}`, `args`, `clock`, `look`. With a module or a script, `serve`
imports it under its own name, so that the work of the import is done once (with `look`, it only checks that the server
exists). A session's process is then a fork in which the `if __name__ == "__main__":` block runs. Before the first
session there is a rehearsal: a fork is asked for its tools, to find the modules that a session imports late; those are
imported here, too.

The control socket carries JSON lines. In: `{"start": number, "clock": ...}` or `{"start": number, "command": [...]}`,
each with two descriptors, the session's socket (its stdin and stdout) and its stderr; `{"kill": pid}`. Out:
`{"ready": "fork" | "run" | "no", "why": ..., "missing": bool, "no_clock": ...}` once (missing: the server does not
exist; no_clock: with `look`, why its clock cannot be set, or null),
`{"started": number, "pid": ...}` or `{"failed": number, "why": ...}`, `{"ended": pid, "status": wait status}`.

Invariants: every process is ended with all that it started (`supervision.children`); none outlives this program, and
this program ends, and ends all of them, when the control socket is closed. So nothing is left when tbx is killed in any
way.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import gc
import importlib.util
import json
import os
import random
import select
import selectors
import signal
import socket
import stat
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_REHEARSAL_S = 20.0  # if a server takes longer to list its tools, the rehearsal is given up
_END_S = 2.0  # for killed processes to end
_TRACEBACK_LINES = 12
_SCRIPT_NAME = "__mp_main__"  # as multiprocessing names a script that is imported; it cannot clash with a module


class CannotFork(Exception):
    """The server must be run for each session instead of forked; the message says why."""


class CannotStart(Exception):
    """The server cannot run at all; the message says why."""


class NotFound(CannotStart):
    """The server itself does not exist (as opposed to a module that it imports)."""


def main(arguments: list[str]) -> None:
    mode, *rest = arguments
    _forget_own_folder()
    if mode == "run":
        _run(json.loads(rest[0]))
    control = socket.socket(fileno=int(rest[0]))
    control.set_inheritable(False)
    children.die_with_parent()  # while importing; later the control socket is closed
    children.adopt_orphans()
    _Server(control, json.loads(rest[1])).serve()


# --- the server's module ------------------------------------------------------------------------------------


class Program:
    """A server that is imported and could run.

    Attributes:
        module: imported module, under its own name.
        block: code of its `if __name__ == "__main__":` block.
        random_state: state of `random` if the import seeded it with an argument; else None.
        libraries: folders of the standard library and of installed packages.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        name, source, file = _locate(config)
        self.block = _main_block(source, file)
        sys.argv[:] = [file, *config.get("args", [])]
        with _noticing_seeds() as seeds:
            self.module = _import_script(file) if name is None else importlib.import_module(name)
        self.random_state = random.getstate() if any(seeds) else None
        paths = sysconfig.get_paths()
        self.libraries = {os.path.realpath(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")}

    def is_own(self, name: str) -> bool:
        """Whether an imported module is the server's own, and no library's: of its package, or not installed."""
        package = self.module.__name__.partition(".")[0]
        return name == package or name.startswith(f"{package}.") or self._is_local(sys.modules.get(name))

    def _is_local(self, module: Any) -> bool:
        """Whether a module comes from a file that is neither of the standard library nor installed."""
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            return False
        path = os.path.realpath(file)
        folders = {*self.libraries, f"{os.sep}site-packages", f"{os.sep}dist-packages"}
        return not any(f"{folder}{os.sep}" in path for folder in folders)

    def run(self, clock: dict[str, Any] | None) -> None:
        """What `python -m` would run once the module's definitions are done."""
        sys.modules["__main__"] = self.module
        if clock is not None:
            server_clock = _load_clock()
            if why := server_clock.reason_not_settable():
                sys.exit(f"its clock cannot be set: {why}, and needs {server_clock.REQUIREMENT}")
            server_clock.set_clock(clock["moment_ns"], clock["runs"])
        exec(self.block, self.module.__dict__)


@contextlib.contextmanager
def _noticing_seeds() -> Iterator[list[bool]]:
    """Records calls of `random.seed`: True for each that gives a seed."""
    seeds: list[bool] = []
    plain_seed = random.seed

    def seed(*args: Any, **kwargs: Any) -> None:
        seeds.append(bool(args or kwargs))
        plain_seed(*args, **kwargs)

    random.seed = seed
    try:
        yield seeds
    finally:
        random.seed = plain_seed


def _locate(config: dict[str, Any]) -> tuple[str | None, str, str]:
    """Name (None for a script), source and file of the module to import."""
    if "script" in config:
        file = os.path.abspath(config["script"])
        _find_modules_in(os.path.dirname(file))
        try:
            with open(file, "rb") as opened:
                return None, importlib.util.decode_source(opened.read()), file
        except FileNotFoundError as error:
            raise NotFound(f"{file} is not there") from error
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise CannotFork(f"{file} cannot be read as Python source: {error}") from error
    name = config["module"]
    _find_modules_in(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the server's own package imports
        raise NotFound(f"{error}, on sys.path {sys.path}") from error
    if spec is None:
        raise NotFound(f"No module named {name!r}, on sys.path {sys.path}")
    source = getattr(spec.loader, "get_source", lambda name: None)(name)
    if source is None or spec.origin is None:
        raise CannotFork(f"module {name} has no Python source")
    return name, source, spec.origin


def _looked(config: dict[str, Any]) -> dict[str, Any]:
    """The message `ready` of a program that only checks that the server exists."""
    no_clock = _load_clock().reason_not_settable()
    try:
        _locate(config)
    except NotFound as reason:
        return {"ready": "no", "why": str(reason), "missing": True}
    except BaseException as error:  # the process boundary: its package may raise anything, so the server exists
        return {"ready": "run", "why": str(error), "no_clock": no_clock}
    return {"ready": "run", "no_clock": no_clock}


def _find_modules_in(folder: str) -> None:
    """Put a folder on the module path, where the interpreter itself would have put it."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, folder)


def _main_block(source: str, file: str) -> Any:
    """Code of the module's main block.

    Raises:
        CannotFork: there is no such block, or the module does not end with it, so that importing the module and then
            running the block would differ from running the module.
    """
    tree = ast.parse(source, file)
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_main_test(node.test)]
    if not guards:
        raise CannotFork(f"{file} has no `if __name__ == '__main__':` block")
    if len(guards) > 1 or guards[0] is not tree.body[-1] or guards[0].orelse:
        raise CannotFork(f"{file} does not end with its only `if __name__ == '__main__':` block")
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            flags |= sum(getattr(__future__, alias.name).compiler_flag for alias in node.names)
    return compile(ast.Module(guards[0].body, []), file, "exec", flags=flags, dont_inherit=True)


def _is_main_test(test: ast.expr) -> bool:
    """Whether an expression is `__name__ == "__main__"`, in either order."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    sides = {ast.unparse(test.left), ast.unparse(test.comparators[0])}
    return sides == {"__name__", "'__main__'"}


def _import_script(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(_SCRIPT_NAME, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT_NAME] = module
    spec.loader.exec_module(module)
    return module


def _load(path: str) -> Any:
    """A module of tbx, given its path from this file's folder, under a name that no module of a server has."""
    name = f"_tbx_{os.path.splitext(os.path.basename(path))[0]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_clock() -> Any:
    return _load("server_clock.py")


children = _load(os.path.join(os.pardir, "supervision", "children.py"))


def _preload_clock() -> None:
    """Import what sets a clock, so that no session has to."""
    if _load_clock().reason_not_settable() is None:
        importlib.import_module("time_machine")


def _forget_own_folder() -> None:
    """Remove this file's folder from the module path: a server must not find tbx's modules there."""
    folder = os.path.dirname(os.path.realpath(__file__))
    if sys.path and os.path.realpath(sys.path[0]) == folder:
        del sys.path[0]


def _run(config: dict[str, Any]) -> NoReturn:
    """The mode `run`: be the process of one session."""
    try:
        program = Program(config)
    except (CannotFork, CannotStart) as error:
        sys.exit(f"its clock cannot be set: {error}")
    _finish(lambda: program.run(config.get("clock")))


def _finish(run: Callable[[], None]) -> NoReturn:
    """Run, then end as an interpreter would, without tearing down the imported modules."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = _exit_status(end.code)
    except BaseException:  # the process boundary: any exception of a server's program ends its process
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # as above: a broken exit must still end the process
        traceback.print_exc()
    finally:
        os._exit(status)


def _exit_status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


# --- serving ------------------------------------------------------------------------------------------------


class _Server:
    """The program's mode `serve`: one thread, one loop over the control socket and the ends of processes."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.config = config
        self.program: Program | None = None
        self.live: set[int] = set()
        self.descriptors: list[int] = []  # received but not yet used
        self.wake_read, self.wake_write = socket.socketpair()
        self.report_read, self.report_write = socket.socketpair(type=socket.SOCK_DGRAM)
        self.reported: set[str] = set()  # names of modules that sessions imported late, each tried once
        self.trials: dict[int, list[str]] = {}  # forks that import such modules to test whether that is harmless

    def serve(self) -> NoReturn:
        self._prepare()
        for end in (self.wake_read, self.wake_write, self.report_read, self.report_write):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wake_write.fileno(), warn_on_full_buffer=False)
        children.die_with_parent(False)
        buffer = b""
        with selectors.DefaultSelector() as selector:
            self.selector = selector
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(self.wake_read, selectors.EVENT_READ)
            selector.register(self.report_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self.wake_read in ready:
                    self._drain()
                    self._reap()
                if self.report_read in ready:
                    self._try_imports(self.report_read.recv(1 << 20).decode().split())
                if self.control in ready:
                    data = self._receive()
                    if not data:
                        self._end()
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))

    def _prepare(self) -> None:
        """Import the server, if there is one to import, and report the result."""
        if not self.config.get("module") and not self.config.get("script"):
            self._say(ready="run")
            return
        if self.config.get("look"):
            self._say(**_looked(self.config))
            return
        try:
            self.program = _preloaded(self.config, self.control)
        except CannotFork as reason:
            self._say(ready="run", why=str(reason))
        except CannotStart as reason:
            self._say(ready="no", why=str(reason), missing=isinstance(reason, NotFound))
            os._exit(1)
        else:
            self._say(ready="fork")

    def _receive(self) -> bytes:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, 1 << 16, 16, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        except OSError:
            return b""
        self.descriptors += descriptors
        return data

    def _obey(self, request: dict[str, Any]) -> None:
        if "kill" in request:
            if request["kill"] in self.live:
                children.kill(request["kill"])
            return
        link, errors, *self.descriptors = self.descriptors
        if request.get("clock"):
            _preload_clock()
        parent = os.getpid()
        try:
            pid = _fork()
        except OSError as error:
            self._say(failed=request["start"], why=f"no process could be forked: {error}")
        else:
            if pid == 0:
                self._become(request, link, errors, parent)
            self.live.add(pid)
            self._say(started=request["start"], pid=pid)
        os.close(link)
        os.close(errors)

    def _become(self, request: dict[str, Any], link: int, errors: int, parent: int) -> NoReturn:
        """In a new process: become the session's server."""
        try:
            self.selector.close()
            _enter_process(parent, link, errors, [self.control, self.wake_read, self.wake_write, self.report_read])
            if request.get("command"):
                _execute(request["command"])
            assert self.program is not None
            _run_forked(self.program, request.get("clock"), self.report_write)
        finally:
            os._exit(1)

    def _drain(self) -> None:
        try:
            while self.wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        """Collect processes that have ended, and kill what they left."""
        for pid, status in children.take_ended():
            if pid in self.trials:
                self._import_tried(self.trials.pop(pid), status)
            elif pid in self.live:
                self.live.discard(pid)
                self._say(ended=pid, status=status)
        children.kill_left(self.live | set(self.trials))

    def _try_imports(self, names: list[str]) -> None:
        """Let a fork import what a session imported late, to test whether this process could and stay forkable."""
        names = [name for name in names if name not in self.reported and name not in sys.modules]
        self.reported.update(names)
        if not names:
            return
        before = _descriptors()
        try:
            pid = _fork()
        except OSError:  # too many processes at the moment: sessions keep importing these themselves
            return
        if pid == 0:
            try:
                _import_late_modules(names)
                _require_forkable(before)
                os._exit(0)
            finally:
                os._exit(1)
        self.trials[pid] = names

    def _import_tried(self, names: list[str], status: int) -> None:
        if status == 0:
            _import_late_modules(names)
            gc.collect()
            gc.freeze()

    def _end(self) -> NoReturn:
        """Kill everything and end."""
        children.end_all(self.live | set(self.trials), _END_S)
        os._exit(0)

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # tbx has ended; the next read detects it
            self.control.sendall(json.dumps(message).encode() + b"\n")


def _enter_process(parent: int, link: int, errors: int, ours: list[socket.socket]) -> None:
    """Right after the fork: start a session, use its own descriptors, close this program's."""
    children.begin(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(link, 0)
    os.dup2(link, 1)
    os.dup2(errors, 2)
    for descriptor in (link, errors):
        os.close(descriptor)
    for own in ours:
        own.close()


def _execute(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started in {os.getcwd()}: {error}\n".encode())
        os._exit(127)


def _run_forked(program: Program, clock: dict[str, Any] | None, report: socket.socket) -> NoReturn:
    known = set(sys.modules)
    _renew_text_streams()
    _seed_as_if_started(program)
    gc.enable()

    def run() -> None:
        program.run(clock)
        late = [name for name in sys.modules if name not in known and not program.is_own(name)]
        if late:
            with contextlib.suppress(OSError):  # the report is optional
                report.send("\n".join(late).encode())

    _finish(run)


def _seed_as_if_started(program: Program) -> None:
    """Random numbers as after a fresh start: seeded by the system, unless the server's import gave a seed."""
    if program.random_state is not None:  # Python itself has reseeded `random` in this fork
        random.setstate(program.random_state)
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        generator = getattr(numpy_random, "get_bit_generator", lambda: None)()
        if getattr(generator, "seed_seq", True) is not None:  # None: seeded with a number
            numpy_random.seed()


def _renew_text_streams() -> None:
    """Replace `sys.stdin` and `sys.stdout` by what a fresh interpreter would create for these descriptors."""
    old_in, old_out = sys.stdin, sys.stdout
    unbuffered = getattr(old_out, "write_through", False)
    stdin = open(0, encoding=old_in.encoding, errors=old_in.errors, closefd=False)  # noqa: SIM115
    stdout = open(1, "w", encoding=old_out.encoding, errors=old_out.errors, closefd=False)  # noqa: SIM115
    if unbuffered:
        stdout.reconfigure(write_through=True)
    vars(sys).update(stdin=stdin, stdout=stdout, __stdin__=stdin, __stdout__=stdout)


# --- preloading ---------------------------------------------------------------------------------------------


def _preloaded(config: dict[str, Any], control: socket.socket) -> Program:
    """The server, imported and rehearsed, in a process that may be forked.

    Raises:
        CannotFork: forking the server would differ from starting it.
        CannotStart: the server cannot be imported.
    """
    before = _descriptors()
    gc.disable()
    try:
        program = Program(config)
    except (CannotFork, CannotStart):
        raise
    except BaseException as error:  # the process boundary: an import may raise anything, even SystemExit
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip().splitlines()
        told = "\n".join(lines[-_TRACEBACK_LINES:])
        raise CannotStart(f"it raised {type(error).__name__} while it was imported:\n{told}") from error
    _require_silence("while it was imported")
    _require_forkable(before)
    if config.get("rehearse", True):
        _import_late_modules(_rehearsal(program, control))
        _require_silence("while it was rehearsed")
        try:
            _require_forkable(before)
        except CannotFork:  # one of the late imports does not survive a fork: start again without them
            control.set_inheritable(True)
            again = json.dumps({**config, "rehearse": False})
            command = [__file__, "serve", str(control.fileno()), again]
            os.execv(sys.executable, [sys.executable, *_interpreter_options(), *command])
    gc.collect()
    gc.freeze()
    return program


def _interpreter_options() -> list[str]:
    """The options that this interpreter was started with."""
    options = sys.orig_argv[1:]
    return options[: options.index("serve") - 1] if "serve" in options else []


def _require_silence(when: str) -> None:
    """Check that nothing was printed to stdout, which belongs to the protocol: tbx would read it first."""
    sys.stdout.flush()
    if not stat.S_ISREG(os.fstat(1).st_mode):
        return
    size = os.lseek(1, 0, os.SEEK_END)
    if size:
        os.lseek(1, 0, os.SEEK_SET)
        printed = os.read(1, 200).decode(errors="replace")
        raise CannotStart(f"it printed to stdout {when}, which belongs to the protocol: {printed!r}")


def _require_forkable(before: set[int]) -> None:
    """Check that no state of this process would be shared, or lost, by a fork."""
    if threading.active_count() > 1:
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        raise CannotFork(f"its import started threads ({', '.join(names)}), which a fork does not copy")
    if started := children.children():
        raise CannotFork(f"its import started processes ({sorted(started)}), which the forks would not have")
    for descriptor in sorted(_descriptors() - before):
        if kind := _shared_by_fork(descriptor):
            raise CannotFork(f"its import left open {kind}, which all forks would share")


def _descriptors() -> set[int]:
    try:
        listed = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # no /proc: unknown
        return set()
    return {descriptor for descriptor in listed if _is_open(descriptor)}  # without the one that listed the folder


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _shared_by_fork(descriptor: int) -> str | None:
    """The kind of an open descriptor that forks must not share; None if they may."""
    target = os.readlink(f"/proc/self/fd/{descriptor}")
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or target.startswith("anon_inode:"):
        return f"a connection ({target})"
    flags = int(fields["flags"], 8)
    writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_APPEND
    return f"a file for writing ({target})" if stat.S_ISREG(mode) and writes else None


def _import_late_modules(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # the session imports it itself, as without a rehearsal
            continue


def _rehearsal(program: Program, control: socket.socket) -> list[str]:
    """Names of the modules that a session imports before it has listed its tools, in order."""
    known = len(sys.modules)
    ours, theirs = socket.socketpair()
    names_read, names_write = os.pipe()
    parent = os.getpid()
    pid = _fork()
    if pid == 0:
        try:
            ours.close()
            os.close(names_read)
            _enter_process(parent, theirs.detach(), os.open(os.devnull, os.O_WRONLY), [control])
            _finish_rehearsal(program, known, names_write)
        finally:
            os._exit(1)
    theirs.close()
    os.close(names_write)
    deadline = time.monotonic() + _REHEARSAL_S
    try:
        _ask_for_tools(ours, deadline)
        ours.shutdown(socket.SHUT_WR)
        told = _read_until(names_read, b"", deadline)
    except (OSError, ValueError):  # it ended, hung or sent an invalid answer: the first real session will report it
        told = b""
    finally:
        ours.close()
        os.close(names_read)
        children.end_all([pid], _END_S)
    return told.decode().split()


def _finish_rehearsal(program: Program, known: int, names: int) -> NoReturn:
    _renew_text_streams()

    def run() -> None:
        try:
            program.run(None)
        finally:
            os.write(names, "\n".join(list(sys.modules)[known:]).encode())

    _finish(run)


def _ask_for_tools(link: socket.socket, deadline: float) -> None:
    client = {"name": "tbx", "version": "rehearsal"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    for number, method, params in ((1, "initialize", hello), (2, "tools/list", {})):
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        link.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(_read_until(link.fileno(), b"\n", deadline).splitlines()[-1])
        if answer.get("id") != number:
            raise ValueError("no answer to the request")
        if number == 1:
            link.sendall(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')


def _read_until(descriptor: int, end: bytes, deadline: float) -> bytes:
    """The data up to and including `end`, or, with an empty `end`, until the other side closes."""
    data = b""
    while not (end and data.endswith(end)):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("no answer")
        read = os.read(descriptor, 1 << 16)
        if not read:
            if end:
                raise ValueError("it ended")
            break
        data += read
    return data


# --- processes ----------------------------------------------------------------------------------------------


def _fork() -> int:
    """`os.fork` without its warning about threads: Python's were excluded, those of libraries are their concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


if __name__ == "__main__":
    main(sys.argv[1:])
