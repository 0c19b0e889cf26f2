"""The sessions that `tbx serve` holds for its clients: creation, use and end, without HTTP.

Requests of one session are sequential; those of different sessions run in parallel, each in a thread, since a pool's
calls block. A fault ends its session: whether the call had an effect is unknown, so nothing may continue from there.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from tbx_envs.errors import CheckFault, TbxError, ToolFault, did_you_mean
from tbx_envs.tools.session import ServedTool, ServerSession

T = TypeVar("T")

PROXY_INFO = "__reserved__proxy_info"
# Number of ended sessions whose ids are kept, so that the answer to a late request can say what happened.
_REMEMBERED = 10_000


class Pool(Protocol):
    """The part of `tbx_envs.thinkingbox.servers.server_pool.ServerPool` that is needed."""

    def open(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        *,
        servers: Sequence[str],
        clock: datetime.datetime | None = None,
        clock_runs: bool = False,
        session_id: str | None = None,
    ) -> ServerSession: ...

    def close(self) -> None: ...


class SessionError(Exception):
    """A request that cannot be carried out; the message says why."""


class Full(SessionError):
    """The maximum number of sessions exists; nothing was started."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionOptions:
    """A client's options for its session.

    Attributes:
        tools: names of the tools that it may call; each must exist.
        timeout_s: time limit of the start, and of each call.
        always_json_output: whether an answer that is not JSON becomes `{"result": answer}`.
        proxy_info: whether the effects also list the calls.
    """

    tools: tuple[str, ...]
    timeout_s: float
    always_json_output: bool = False
    proxy_info: bool = False


class _Live:
    """One session. `lock` is held while a request of it runs and guards all other attributes."""

    def __init__(self, servers: tuple[str, ...], options: SessionOptions, now: float) -> None:
        self.servers, self.options = servers, options
        self.lock = asyncio.Lock()
        self.last_used = now
        self.tools: dict[str, ServedTool] = {}
        self.calls: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {}
        self._served: ServerSession | None = None

    @property
    def served(self) -> ServerSession:
        assert self._served is not None, "asked for before it was opened"
        return self._served

    @property
    def is_open(self) -> bool:
        return self._served is not None

    def opened(self, served: ServerSession) -> None:
        self._served = served
        offered = set(self.options.tools)
        self.tools = {tool.name: tool for tool in served.tools if tool.name in offered}


class LiveSessions:
    """All sessions of a server.

    Args:
        pool: pool of the servers, which `shut_down` closes.
        servers: names of the servers that clients may use.
        clock, clock_runs: clock of the servers, as in `ServerPool.open`.
        max_sessions: maximum number of sessions at the same time.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        servers: Sequence[str],
        clock: datetime.datetime | None = None,
        clock_runs: bool = False,
        max_sessions: int = 256,
    ) -> None:
        self._pool, self._servers = pool, tuple(servers)
        self._clock, self._clock_runs = clock, clock_runs
        self._max_sessions = max_sessions
        self._live: dict[str, _Live] = {}
        self._ended: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        # A session never needs more than two threads: one for its call, one to end it during the call.
        self._threads = anyio.CapacityLimiter(2 * max_sessions + 2)

    def __len__(self) -> int:
        return len(self._live)

    async def create(
        self, session_id: str, configs: Mapping[str, Mapping[str, Any]], options: SessionOptions
    ) -> dict[str, Any]:
        """Start the servers of `configs`.

        Returns:
            server -> answer of its init.

        Raises:
            SessionError: the id is taken, a server or a tool does not exist, or a server failed.
            Full: there are `max_sessions` already.
        """
        if session_id in self._live:
            raise SessionError("Session already exists")
        for name in configs:
            if name not in self._servers:
                known = ", ".join(self._servers)
                raise SessionError(
                    f"Server {name} does not exist.{did_you_mean(name, self._servers)} There are: {known}"
                )
        if len(self._live) >= self._max_sessions:
            raise Full(f"There are {len(self._live)} sessions, as many as may exist. Destroy one, or wait.")
        live = self._live[session_id] = _Live(tuple(configs), options, _now())
        async with live.lock:
            try:
                live.opened(await self._open(session_id, configs, options.timeout_s))
                for name in options.tools:
                    if name not in live.tools:
                        raise SessionError(f"Tool {name} does not exist")
            except BaseException as error:
                if live.is_open:
                    await self._end(session_id, live, "it was not what its client asked for", live.served.close)
                else:
                    self._live.pop(session_id, None)
                if isinstance(error, TbxError):
                    raise SessionError(str(error)) from error
                raise
            live.last_used = _now()
            return {server: dict(result) for server, result in live.served.init_result.items()}

    async def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> str:
        """The text of the tool's answer.

        Raises:
            SessionError: there is no such session or tool, or the call failed, which ends the session.
        """
        async with self._used(session_id) as live:
            if tool not in live.tools:
                raise SessionError(f"Tool {tool} does not exist")
            answer = await self._in_time(session_id, live, tool, functools.partial(live.served.call, tool, arguments))
            text = _as_json(answer.text) if live.options.always_json_output else answer.text
            if live.options.proxy_info:
                live.calls.append({"tool_name": tool, "arguments": dict(arguments), "response": text})
            return text

    async def call_reserved(self, session_id: str, server: str, tool: str, arguments: Mapping[str, Any]) -> str:
        """The answer of any tool of one server, its JSON as text; for privileged clients only.

        Raises:
            SessionError: there is no such session or tool, or the call failed, which ends the session.
        """
        async with self._used(session_id) as live:
            if server not in live.servers:
                raise SessionError(f"Tool {server} > {tool} does not exist")
            asked = functools.partial(live.served.call_reserved, server, tool, arguments)
            value = await self._in_time(session_id, live, f"{server} > {tool}", asked)
            return value if isinstance(value, str) else json.dumps(value)

    async def effects(self, session_id: str) -> dict[str, Any]:
        """server -> effects; {} for a server that reports none.

        Raises:
            SessionError: there is no such session, or effects cannot be read (which never gives {}).
        """
        async with self._used(session_id) as live:
            found = await self._in_time(session_id, live, "the effects", live.served.effects)
            effects: dict[str, Any] = {server: dict(found.get(server, {})) for server in live.servers}
            if live.options.proxy_info:
                effects[PROXY_INFO] = {"tool_calls": list(live.calls)}
            return effects

    async def tools(self, session_id: str) -> Mapping[str, ServedTool]:
        """name -> tool, in the order of the listing."""
        async with self._used(session_id) as live:
            return live.tools

    async def info(self, session_id: str, update: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
        """The information that a client stores with its session, after `update`."""
        async with self._used(session_id) as live:
            info = {**live.info, **update}
            if len(json.dumps(info)) > max_bytes:
                raise SessionError(f"The session's info would be larger than {max_bytes} bytes.")
            live.info = info
            return info

    async def destroy(self, session_id: str) -> None:
        """Tear a session down and end it; does nothing if it has already ended.

        Raises:
            SessionError: there has never been such a session.
        """
        live = self._live.get(session_id)
        if live is None:
            if session_id not in self._ended:
                raise SessionError("Session does not exist")
            return
        async with live.lock:
            if self._live.get(session_id) is live:
                await self._end(session_id, live, "it was destroyed", live.served.close)

    async def destroy_all(self) -> None:
        await self._destroy_each(list(self._live))

    async def collect(self, idle_s: float) -> list[str]:
        """Destroy sessions that were not used for `idle_s` seconds (a running call is use); returns their ids."""
        before = _now() - idle_s
        idle = [name for name, live in self._live.items() if not live.lock.locked() and live.last_used < before]
        await self._destroy_each(idle)
        return idle

    async def collect_forever(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(min(60.0, idle_s / 4))
            await self.collect(idle_s)

    async def shut_down(self) -> None:
        """End all sessions, including calls in progress, and close the pool."""
        ends = [
            live.served.discard if live.lock.locked() else live.served.close
            for live in self._live.values()
            if live.is_open
        ]
        self._live.clear()
        await asyncio.gather(*(self._in_thread(end) for end in ends))
        await self._in_thread(self._pool.close)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _destroy_each(self, session_ids: Sequence[str]) -> None:
        ended = await asyncio.gather(*map(self.destroy, session_ids), return_exceptions=True)
        for result in ended:
            # It is not an error if another request destroyed one of them meanwhile.
            if isinstance(result, BaseException) and not isinstance(result, SessionError):
                raise result

    @contextlib.asynccontextmanager
    async def _used(self, session_id: str) -> AsyncIterator[_Live]:
        """The session, for exclusive use by one request.

        Raises:
            SessionError: there is no such session.
        """
        live = self._live.get(session_id)
        if live is None:
            raise self._gone(session_id)
        async with live.lock:
            if self._live.get(session_id) is not live:
                raise self._gone(session_id)
            live.last_used = _now()
            try:
                yield live
            finally:
                live.last_used = _now()

    def _gone(self, session_id: str) -> SessionError:
        reason = self._ended.get(session_id)
        return SessionError("Session does not exist" + (f": {reason}" if reason else ""))

    async def _open(self, session_id: str, configs: Mapping[str, Mapping[str, Any]], timeout_s: float) -> ServerSession:
        """A started session; one that starts too late is discarded."""
        start = functools.partial(
            self._pool.open,
            configs,
            servers=list(configs),
            clock=self._clock,
            clock_runs=self._clock_runs,
            session_id=session_id,
        )
        task = self._spawn(self._in_thread(start))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                raise SessionError(f"The servers did not start within {timeout_s:g} seconds")
        except BaseException:
            task.add_done_callback(self._discard_late)
            raise
        return task.result()

    def _discard_late(self, opened: asyncio.Task[ServerSession]) -> None:
        if not opened.cancelled() and opened.exception() is None:
            self._spawn(self._in_thread(opened.result().discard))

    async def _in_time(self, session_id: str, live: _Live, what: str, function: Callable[[], T]) -> T:
        """The return value of a function of the session's servers, within the session's time limit.

        The session is only released once the function has ended: after the time limit the servers are ended, and so is
        every call that waits for them.

        Raises:
            SessionError: it failed or took too long. The session has ended, unless only effects could not be read.
        """
        late = asyncio.Event()

        def expire() -> None:
            late.set()
            self._spawn(self._in_thread(live.served.discard))

        timer = asyncio.get_running_loop().call_later(live.options.timeout_s, expire)
        try:
            result = await self._in_thread(function)
        except CheckFault as fault:
            if not late.is_set():
                raise SessionError(str(fault)) from fault
        except ToolFault as fault:
            if not late.is_set():
                await self._end(session_id, live, f"{what} failed: {fault}", live.served.discard)
                raise SessionError(f"{fault} The session has ended.") from fault
        except BaseException:
            await self._end(session_id, live, f"{what} broke the server", live.served.discard)
            raise
        finally:
            timer.cancel()
        if late.is_set():
            reason = f"{what} did not answer within {live.options.timeout_s:g} seconds"
            await self._end(session_id, live, reason, live.served.discard)
            raise SessionError(
                f"Tool call timed out: {reason}. Whether it had an effect is unknown; the session has ended."
            )
        return result

    async def _end(self, session_id: str, live: _Live, reason: str, how: Callable[[], None]) -> None:
        if self._live.get(session_id) is live:
            del self._live[session_id]
        self._ended.pop(session_id, None)
        self._ended[session_id] = reason
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        await self._in_thread(how)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, limiter=self._threads)

    def _spawn(self, work: Awaitable[T]) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()


def _as_json(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps({"result": text})
    return text
