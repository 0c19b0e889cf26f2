"""Tools in this process through real MCP: one long-lived session, with the episode in a context variable.

A *driver* is a thread with an event loop of its own, in which an owner task holds one MCP server and its client open. A
call is handed to the driver and awaited with a time limit. There is one driver as long as calls are made one after the
other, and more when several threads call at once.

Plain functions run in a thread because nothing else can enforce a time limit. A tool that loops or blocks would hold an
event loop in the caller's thread forever; here the caller stops waiting, the driver is abandoned, and the next call
gets a new one. The hand-over costs about 15 microseconds, compared with about 100 for the call itself, and works inside
a running loop too (a notebook).

Guaranteed: `call` answers or raises `ToolFault` within the limit, unless a tool blocks the whole interpreter inside a C
extension that does not release it. Not guaranteed: that an abandoned tool stops. It is asked to (SQLite is interrupted
and `ToolAbandoned` is raised in its thread), its database is never used again, and its thread cannot keep the process
alive. `ToolAbandoned` is raised while a tool runs and at no other time, and ends there: neither the protocol's tasks
nor the end of the thread ever meet it, so nothing is printed about a call that no one waits for.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mcp import Client
from mcp.shared.exceptions import MCPError

from tbx_envs.domains import Domain
from tbx_envs.domains.mcp_server import build_server, read_result
from tbx_envs.domains.worlds import World, domain_tools
from tbx_envs.errors import ToolFault
from tbx_envs.tools.arguments import transport_problem
from tbx_envs.tools.calls import answer_call
from tbx_envs.tools.listing import function_dicts
from tbx_envs.tools.session import Answer
from tbx_envs.tools.tool import Tool

_START_S = 30.0  # time limit for a driver to start; imports are done, so only an overloaded machine reaches it


class ToolAbandoned(BaseException):
    """Raised in the thread of a tool that was too slow; not an `Exception`, so that no tool catches it."""


@dataclasses.dataclass(frozen=True, slots=True)
class InProcessSession:
    """The tools of one episode (`tbx_envs.tools.session.ToolSession`).

    Attributes:
        domain: domain of the task.
        world: database of the episode; None for a session that only lists tools.
        timeout_s: time limit of one call.
        tools: name -> tool of the domain.
    """

    domain: Domain
    world: World | None
    timeout_s: float
    tools: Mapping[str, Tool]

    @classmethod
    def open(cls, domain: Domain, world: World | None, timeout_s: float) -> InProcessSession:
        return cls(domain, world, timeout_s, domain_tools(domain))

    def call(self, name: Any, arguments: Any) -> Answer:
        """See `ToolSession.call`."""
        problem = transport_problem(name, arguments)
        if problem is not None:
            return Answer(problem, "invalid")
        try:
            return read_result(_drive(self, "call_tool", name, dict(arguments)))
        except MCPError as error:
            if isinstance(error.__cause__, ToolFault):
                raise error.__cause__ from error.__cause__.__cause__
            raise ToolFault(f"tool {name}: the in-process MCP session failed: {error}. The episode is void.") from error

    def list_tools(self) -> list[dict[str, Any]]:
        """The tools as the server lists them, in canonical form.

        Raises:
            ToolFault: the listing failed.
        """
        listed = _drive(self, "list_tools")
        return function_dicts((tool.name, tool.description or "", tool.input_schema) for tool in listed.tools)


# --- drivers ------------------------------------------------------------------------------------------------

# The session whose call the shared server is answering, and the driver that it does so in.
_session: contextvars.ContextVar[InProcessSession] = contextvars.ContextVar("tbx_session")
_driver: contextvars.ContextVar[_Driver] = contextvars.ContextVar("tbx_driver")

# Idle drivers by process id: a thread does not survive a fork, and its loop must not be touched by the child.
_idle_drivers: dict[int, list[_Driver]] = {}


def _drive(session: InProcessSession, method: str, *arguments: Any) -> Any:
    """The result of the MCP client's `method` for `session`, within its time limit."""
    idle = _idle_drivers.setdefault(os.getpid(), [])
    try:
        driver = idle.pop()
    except IndexError:
        driver = _Driver()
    driver.requests.put((session, method, arguments))
    try:
        result, error = driver.replies.get(timeout=session.timeout_s)
    except queue.Empty:
        driver.abandon(session)
        what = f"tool {arguments[0]}" if arguments else method
        raise ToolFault(
            f"{what} did not answer within {session.timeout_s:g} s. Its effect is unknown, so the episode is "
            f"void. Make the tool faster, or raise tool_timeout_s."
        ) from None
    except BaseException:  # an interrupt from the keyboard: the driver is still working on the call
        driver.abandon(session)
        raise
    idle.append(driver)
    if error is not None:
        raise error
    return result


class _Driver:
    """A thread, its event loop, and the MCP server and client that live in it."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="tbx-tools", daemon=True)
        self._lock = threading.Lock()
        self._tool_runs = False  # these two are guarded by the lock
        self._abandoned = False
        if not _idle_drivers.get(os.getpid()):
            atexit.unregister(_close_drivers)
            atexit.register(_close_drivers)
        self.thread.start()
        try:
            _, error = self.replies.get(timeout=_START_S)
        except queue.Empty:
            raise ToolFault(f"the in-process MCP session did not open within {_START_S:g} s.") from None
        if error is not None:
            raise ToolFault(f"the in-process MCP session could not be opened: {error}") from error

    def abandon(self, session: InProcessSession) -> None:
        """Stop waiting for a call, and ask the running tool to stop."""
        with self._lock:
            self._abandoned = True
            if self._tool_runs:
                if session.world is not None:
                    session.world.raw.interrupt()
                _raise_in(self.thread, ToolAbandoned)
        self.requests.put(None)

    def run_tool(self, run: Callable[[], Answer]) -> Answer:
        """In the thread: the answer of a tool, which `abandon` may interrupt until this returns."""
        try:
            with self._lock:
                if self._abandoned:
                    return _NO_ANSWER
                self._tool_runs = True
            try:
                return run()
            finally:
                with self._lock:  # from here on nothing is raised any more
                    self._tool_runs = False
                    if self._abandoned:
                        # Whether what was raised has arrived cannot be seen, so it is raised anew and awaited. To
                        # withdraw it would leave the flag set by which CPython 3.11 notices it: from then on each
                        # function of each thread looks for it as it starts, and under a profiler never ends looking.
                        _raise_in(self.thread, ToolAbandoned)
                        while True:
                            pass
        except ToolAbandoned:
            return _NO_ANSWER

    def _run(self) -> None:
        """The thread: open a session, answer requests until one is `None`, close."""
        loop = asyncio.SelectorEventLoop()  # whatever policy is set
        _driver.set(self)  # copied by the tasks of the session
        try:
            self._answer_requests(loop)
        finally:
            loop.close()

    def _answer_requests(self, loop: asyncio.AbstractEventLoop) -> None:
        opened: asyncio.Future[Client] = loop.create_future()
        close = asyncio.Event()
        owner = loop.create_task(_own_session(opened, close))
        try:
            client = loop.run_until_complete(opened)
        except Exception as error:  # the thread's boundary: handed to the waiting thread
            self.replies.put((None, error))
            return
        try:
            self.replies.put((None, None))
            while (request := self.requests.get()) is not None:
                session, method, arguments = request
                _session.set(session)
                reply: tuple[Any, BaseException | None]
                try:
                    reply = loop.run_until_complete(getattr(client, method)(*arguments)), None
                except Exception as error:  # the thread's boundary, as above
                    reply = None, error
                self.replies.put(reply)
                del request, session, arguments, reply  # do not keep an episode's world alive while idle
        finally:
            close.set()
            loop.run_until_complete(owner)


async def _own_session(opened: asyncio.Future[Client], close: asyncio.Event) -> None:
    """Hold the session open: anyio's scopes must be left by the task that entered them."""
    server = build_server("tbx", lambda: _session.get().domain, _answer)
    try:
        async with Client(server, raise_exceptions=True, cache=None) as client:
            opened.set_result(client)
            await close.wait()
    except Exception as error:  # the thread's boundary: handed to the code that awaits the session
        if opened.done():
            raise
        opened.set_exception(error)


def _answer(name: str, arguments: dict[str, Any]) -> Answer:
    session = _session.get()
    assert session.world is not None, "a session without a world lists tools only"
    world = session.world
    return _driver.get().run_tool(
        lambda: answer_call(session.tools, world.db, session.domain.clock, name, arguments),
    )


# What the protocol is given for a call that no one waits for.
_NO_ANSWER = Answer("the call was abandoned.", "invalid")


def _raise_in(thread: threading.Thread, exception: type[BaseException]) -> None:
    """Raise an exception in another thread, at its next step in Python; it replaces one that is still to be raised."""
    ident = thread.ident
    if ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(exception))


def _close_drivers() -> None:
    """At exit: let every idle driver close its session and its loop."""
    for driver in _idle_drivers.pop(os.getpid(), []):
        driver.requests.put(None)
        driver.thread.join(timeout=5.0)
