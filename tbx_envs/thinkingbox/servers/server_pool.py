"""Sessions of external MCP servers, many at the same time, from any thread.

    with ServerPool(load_servers("servers.yaml", python=sys.executable)) as pool:
        session = pool.open({"bikes": {"data_patch": {}}}, servers=["bikes"])
        session.call("find_customer", {"email": "ada@example.org"})

One thread with one event loop talks to all servers; calls are submitted to it and wait. Guarantees: every method
returns or raises within its time limit; nothing is sent twice; `call` cannot reach a tool with a reserved name; after
`close` no process, thread or descriptor is left; and when this process dies in any way, its servers' processes end.

A pool belongs to the process that created it. A forked child must create its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args

from mcp.shared.exceptions import MCPError

from tbx_envs.doors import clean_text, read_json
from tbx_envs.errors import CheckFault, ConfigError, TbxError, ToolFault
from tbx_envs.thinkingbox.servers.foreign_tools import (
    EFFECTS,
    INIT,
    RESERVED,
    TEARDOWN,
    effects_object,
    init_object,
    result_text,
)
from tbx_envs.thinkingbox.servers.launcher import ClockSetting, Launcher, Start
from tbx_envs.thinkingbox.servers.server_link import ServerLink
from tbx_envs.thinkingbox.servers.servers_file import RemoteServer, ServerSpec, require_servers
from tbx_envs.tools.arguments import transport_problem
from tbx_envs.tools.session import Answer, ServedTool

if TYPE_CHECKING:
    from tbx_envs.thinkingbox.search.search_service import SearchService

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TEARDOWN_S = 10.0  # maximum; the episode's outcome is known by then
_SLACK_S = 15.0  # beyond all other limits, after which the pool's own thread must be stuck
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class _ServiceGone(ToolFault):
    """The search service that a session was opened with has ended, and what its servers stored there is lost."""


class ServerPool:
    """Opens sessions of servers.

    Args:
        servers: name -> server, from `load_servers`.
        start: `fork` imports a Python server once and forks it for each session; `spawn` runs it for each session.
        call_timeout_s: time limit of one call.
        start_timeout_s: time limit for starting and initialising all servers of a session, and for reading effects.
        knowledge: whether to start the search service that servers expect, unless one is running.
        knowledge_port: port on 127.0.0.1 where they expect it.
        always_first_part: whether to keep only the first part of a result, as the original does (`result_text`).

    Raises:
        ConfigError: `start` is unknown.
    """

    def __init__(
        self,
        servers: Mapping[str, ServerSpec],
        *,
        start: Start = "fork",
        call_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        knowledge: bool = True,
        knowledge_port: int = 8108,
        always_first_part: bool = False,
    ) -> None:
        if start not in get_args(Start):
            raise ConfigError(
                f"servers cannot be started by {start!r}. Give start one of {', '.join(get_args(Start))}."
            )
        self.servers = dict(servers)
        self.call_timeout_s, self.start_timeout_s = call_timeout_s, start_timeout_s
        self.always_first_part = always_first_part
        self._knowledge_port = knowledge_port if knowledge else None
        self._engine = _Engine(start)
        self._finalizer = weakref.finalize(self, self._engine.close)

    def open(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        *,
        servers: Sequence[str],
        clock: datetime.datetime | None = None,
        clock_runs: bool = False,
        session_id: str | None = None,
    ) -> PoolSession:
        """Start servers for one episode and initialise them.

        Args:
            configs: server -> configuration for its `__reserved__init`; {} for a server that is missing.
            servers: names of the servers to start, in registration order.
            clock: moment of the servers' clocks, in UTC if it has no time zone; None for the real time.
            clock_runs: whether the clock runs from that moment; otherwise it stands still.
            session_id: id for servers that ask for one; None takes a new one.

        Raises:
            ToolFault: a server was not started and initialised in time. Nothing is left of the session.
            ConfigError: a server is not in the file, or cannot be started as configured; retrying does not help.
        """
        require_servers(self.servers, servers)
        setting = None if clock is None else ClockSetting(_nanoseconds(clock), clock_runs)
        specs = {name: self.servers[name] for name in dict.fromkeys(servers)}
        limit_s = self.start_timeout_s

        def opened() -> PoolSession:
            service = None if self._knowledge_port is None else self._engine.search_service(self._knowledge_port)
            session = PoolSession(self, session_id or uuid.uuid4().hex, service)
            try:
                self._engine.run(lambda: session._open(specs, configs, setting, limit_s), limit_s)
            except ToolFault as fault:
                session.discard()
                session._require_service(fault)
                raise
            except BaseException:
                session.discard()
                raise
            return session

        try:
            return opened()
        except _ServiceGone:  # it ended while the session was opened; nothing has been called yet
            return opened()

    def tools(self, servers: Sequence[str]) -> tuple[ServedTool, ...]:
        """The tools of servers, as a session lists them; nothing is initialised.

        Raises:
            ToolFault: a server was not started in time.
            ConfigError: a server is not in the file, or cannot be started as configured.
        """
        require_servers(self.servers, servers)
        session = PoolSession(self, uuid.uuid4().hex, None)
        specs = {name: self.servers[name] for name in dict.fromkeys(servers)}
        limit_s = self.start_timeout_s
        try:
            self._engine.run(lambda: session._connect(specs, None, limit_s), limit_s)
        finally:
            session.discard()
        return session.tools

    def close(self) -> None:
        """End all sessions without teardown, and everything else that the pool has started."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PoolSession:
    """One episode's servers (`tbx_envs.tools.session.ServerSession`).

    Attributes:
        session_id: id for servers whose reserved tools ask for one.
        tools, init_result: as in `ServerSession`.
    """

    def __init__(self, pool: ServerPool, session_id: str, service: SearchService | None) -> None:
        self.session_id = session_id
        self.tools: tuple[ServedTool, ...] = ()
        self.init_result: Mapping[str, Mapping[str, Any]] = {}
        self._pool = pool
        self._engine = pool._engine
        self._service = service
        self._links: dict[str, ServerLink] = {}
        self._owners: dict[str, str] = {}  # tool -> its server
        self._over = False
        self._finalizer = weakref.finalize(self, _discard, self._engine, self._links)
        self._finalizer.atexit = False  # the pool ends its sessions

    def call(self, name: Any, arguments: Mapping[str, Any], *, timeout_s: float | None = None) -> Answer:
        """See `ServerSession.call`.

        Args:
            name: tool name.
            arguments: arguments of the call.
            timeout_s: time limit; None takes the pool's.
        """
        if (problem := transport_problem(name, arguments)) is not None:
            return Answer(problem, "invalid")
        server = self._owners.get(name)
        if server is None:
            return Answer(f"Error: function {name!r} does not exist", "invalid")
        limit_s = self._pool.call_timeout_s if timeout_s is None else timeout_s
        try:
            result = self._run(lambda: self._links[server].ask(name, arguments, limit_s=limit_s), limit_s)
        except MCPError as error:
            return Answer(f"Error: {error}", "invalid")
        text = clean_text(result_text(result, first_part_only=self._pool.always_first_part))
        if result.is_error or '"error"' in text:  # the tool may have failed to reach the search service
            self._require_service()
        return Answer(text, "rejected" if result.is_error else "ok")

    def call_reserved(self, server: str, name: str, arguments: Mapping[str, Any]) -> Any:
        """See `ServerSession.call_reserved`; a text that is not JSON is returned as it is."""
        link = self._links.get(server)
        if link is None or name not in link.listing.names:
            known = sorted(link.listing.names) if link is not None else list(self._links)
            raise ToolFault(f"there is no tool {name!r} of server {server!r} in this session; there are {known}.")
        limit_s = self._pool.call_timeout_s
        try:
            result = self._run(lambda: self._ask_reserved(link, name, arguments, limit_s), limit_s)
        except MCPError as error:
            raise ToolFault(f"server '{server}': '{name}' cannot be called so: {error}") from error
        text = clean_text(result_text(result))
        try:
            return read_json(text)
        except ValueError:
            return text

    def effects(self) -> Mapping[str, Mapping[str, Any]]:
        """See `ServerSession.effects`."""
        limit_s = self._pool.start_timeout_s

        async def ask() -> list[Any]:
            return await _all(self._ask_reserved(link, EFFECTS, {}, limit_s) for link in self._having(EFFECTS))

        try:
            results = self._run(ask, limit_s)
        except MCPError as error:
            raise CheckFault(f"the effects could not be read: {error}") from error
        effects = {}
        for link, result in zip(self._having(EFFECTS), results, strict=True):
            try:
                effects[link.name] = effects_object(result)
            except ValueError as problem:
                raise CheckFault(f"server '{link.name}': '{EFFECTS}' answered {problem}") from None
        self._require_service()  # after the calls: if it is still there, it was there at the last call
        return effects

    def close(self) -> None:
        """See `ServerSession.close`. The processes end, or are ended, shortly afterwards."""
        if self._over or not self._engine.is_ours:
            return
        limit_s = min(_TEARDOWN_S, self._pool.call_timeout_s)
        try:
            self._run(lambda: self._tear_down(limit_s), limit_s)
        except TbxError as error:
            logger.info("teardown of session %s failed: %s", self.session_id, error)
        self._end(politely=True)

    def discard(self) -> None:
        """See `ServerSession.discard`."""
        self._end(politely=False)

    # --- inside -----------------------------------------------------------------------------------------------

    def _require_service(self, cause: ToolFault | None = None) -> None:
        """Check that the search service that the session was opened with is still there.

        Without it, tools report a refused connection or rules that were not found as ordinary answers, and that would
        be our failure.

        Raises:
            ToolFault: the service has ended; the session is ended, too.
        """
        if self._service is None or self._service.answers():
            return
        self.discard()
        raise _ServiceGone(
            f"the search service at {self._service.url}, which this session was opened with, has gone: it was "
            f"ended, or started anew. What the tools found there is lost. The episode "
            f"is void and can be attempted again."
        ) from cause

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """The result of a coroutine in the pool's thread; a fault ends the session."""
        if self._over:
            raise ToolFault("this session is over: it was closed, or a fault ended it.")
        try:
            return self._engine.run(make, limit_s)
        except MCPError:
            raise
        except BaseException:  # a fault, or a keyboard interrupt: the effect of the call is unknown
            self.discard()
            raise

    def _end(self, *, politely: bool) -> None:
        if not self._over and self._engine.is_ours:
            self._over = True
            self._finalizer.detach()
            self._engine.finish(list(self._links.values()), politely=politely)

    def _having(self, tool: str) -> list[ServerLink]:
        return [link for link in self._links.values() if tool in link.listing.names]

    async def _ask_reserved(self, link: ServerLink, tool: str, arguments: Mapping[str, Any], limit_s: float) -> Any:
        """The result of a reserved tool, given the session's id if its schema has one."""
        if tool in link.listing.wants_session and tool.startswith(RESERVED):
            arguments = {"session_id": self.session_id, **arguments}
        return await link.ask(tool, arguments, limit_s=limit_s)

    async def _open(
        self,
        specs: Mapping[str, ServerSpec],
        configs: Mapping[str, Mapping[str, Any]],
        clock: ClockSetting | None,
        limit_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        await self._connect(specs, clock, limit_s)
        results = await _all(
            self._initialise(link, configs.get(link.name) or {}, deadline - loop.time())
            for link in self._links.values()
        )
        self.init_result = dict(zip(self._links, results, strict=True))

    async def _connect(self, specs: Mapping[str, ServerSpec], clock: ClockSetting | None, limit_s: float) -> None:
        """Start the servers and list their tools."""
        deadline = asyncio.get_running_loop().time() + limit_s
        for name, spec in specs.items():
            self._links[name] = self._engine.link(name, spec, clock)
        await _all(link.open(deadline) for link in self._links.values())
        served: dict[str, ServedTool] = {}
        for link in self._links.values():
            served.update((tool.name, tool) for tool in link.listing.tools)
        self.tools = tuple(served.values())
        self._owners.update((tool.name, tool.server) for tool in self.tools)

    async def _initialise(self, link: ServerLink, config: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        if INIT not in link.listing.names:
            return {}
        try:
            return init_object(await self._ask_reserved(link, INIT, {"config": config}, limit_s))
        except MCPError as error:
            raise ToolFault(f"server '{link.name}' was not initialised: {error}") from error
        except ValueError as problem:
            raise ToolFault(f"server '{link.name}' was not initialised: '{INIT}' answered {problem}") from None

    async def _tear_down(self, limit_s: float) -> None:
        await _all(self._ask_reserved(link, TEARDOWN, {}, limit_s) for link in self._having(TEARDOWN))


# --- the thread ---------------------------------------------------------------------------------------------


class _Engine:
    """The pool's thread, its event loop, and what runs in it.

    It has no reference to the pool or to sessions, so that both can be garbage-collected.
    """

    def __init__(self, how: Start) -> None:
        self._how = how
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may call `finish` and `close` from anywhere
        self._service_lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._search_service: SearchService | None = None
        self._launchers: dict[str, Launcher] = {}  # these three: in the loop's thread only
        self._links: set[ServerLink] = set()
        self._endings: set[asyncio.Task[None]] = set()
        _engines.add(self)

    @property
    def is_ours(self) -> bool:
        """True if this process created it, and it is open."""
        return not self._closed and self._pid == os.getpid()

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """The result of a coroutine in the engine's thread, which is started when first needed."""
        if self._pid != os.getpid():
            raise ToolFault("a pool belongs to the process that created it. Create one after the fork.")
        with self._lock:
            if self._closed:
                raise ToolFault("the pool is closed.")
            loop = self._started_loop()
            future = asyncio.run_coroutine_threadsafe(make(), loop)
        try:
            return future.result(limit_s + _SLACK_S)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise ToolFault(f"the thread of the pool did not answer within {limit_s + _SLACK_S:g} s.") from None
        except concurrent.futures.CancelledError:
            raise ToolFault("the pool was closed meanwhile.") from None
        except BaseException:
            future.cancel()
            raise

    def link(self, name: str, spec: ServerSpec, clock: ClockSetting | None) -> ServerLink:
        """A new link, which the engine ends at the latest when it closes."""
        if isinstance(spec, RemoteServer):
            link = ServerLink(name, spec, clock)
        else:
            if name not in self._launchers:
                self._launchers[name] = Launcher(spec, self._how)
            link = ServerLink(name, self._launchers[name], clock)
        self._links.add(link)
        return link

    def finish(self, links: Iterable[ServerLink], *, politely: bool) -> None:
        """End links without waiting for their end."""
        with self._lock:
            if self._loop is not None and not self._closed and self._pid == os.getpid():
                self._loop.call_soon_threadsafe(self._finish_soon, list(links), politely)

    def search_service(self, port: int) -> SearchService | None:
        """A search service that answers, for a new session; None when the engine is not ours.

        It is found or started for the first session and kept until the pool closes; one that has ended is replaced.
        """
        from tbx_envs.thinkingbox.search.search_service import ensure_search_service

        with self._service_lock:
            if not self.is_ours:
                return None
            if self._search_service is None or not self._search_service.answers():
                if self._search_service is not None:
                    self._search_service.close()
                self._search_service = ensure_search_service(port=port)
            return self._search_service

    def close(self) -> None:
        """End everything. Does nothing in a forked child, since all of it belongs to the parent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(self._close_soon)
            if thread is not threading.current_thread():
                thread.join(_SLACK_S)
        with self._service_lock:
            if self._search_service is not None:
                self._search_service.close()

    def forget(self) -> None:
        """In a forked child: close the parent's descriptors, so that its servers notice when the parent ends."""
        self._lock, self._service_lock = threading.RLock(), threading.RLock()
        for link in self._links:
            link.forget()
        for launcher in self._launchers.values():
            launcher.forget()

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            # Asyncio's own, whatever policy is set: uvloop does not tell a socket's reader that its peer ended.
            self._loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(target=self._drive, args=(self._loop,), name="tbx-servers", daemon=True)
            self._thread.start()
        return self._loop

    def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._close_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def _close_soon(self) -> None:
        asyncio.get_running_loop().stop()

    def _finish_soon(self, links: Iterable[ServerLink], politely: bool) -> None:
        for link in links:
            if link in self._links:
                self._links.discard(link)
                task = asyncio.get_running_loop().create_task(link.finish(politely=politely))
                self._endings.add(task)
                task.add_done_callback(self._endings.discard)

    async def _close_all(self) -> None:
        """End what is left: sessions at once, then the programs that start their processes, then waiting calls."""
        await asyncio.gather(*(link.finish(politely=False) for link in self._links), return_exceptions=True)
        closing = (launcher.close() for launcher in self._launchers.values())
        await asyncio.gather(*closing, *self._endings, return_exceptions=True)
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


_engines: weakref.WeakSet[_Engine] = weakref.WeakSet()


def _forget_engines() -> None:
    for engine in list(_engines):
        engine.forget()


os.register_at_fork(after_in_child=_forget_engines)


def _discard(engine: _Engine, links: Mapping[str, ServerLink]) -> None:
    engine.finish(list(links.values()), politely=False)


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order; the first failure cancels the others and is raised."""
    waiting = list(coroutines)
    if len(waiting) < 2:
        return [await coroutine for coroutine in waiting]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nanoseconds(moment: datetime.datetime) -> int:
    """Nanoseconds since 1970."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // datetime.timedelta(microseconds=1) * 1000
