"""One server of one session: started or connected to, initialised, called, ended.

All of it runs in the thread of one event loop. The library's `ClientSession` implements MCP. An owner task enters and
exits it, since its scopes must be exited by the task that entered them. The first error of the connection is kept as
`fault`; from then on every request raises it, and nothing is sent any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from tbx_envs.errors import ConfigError, TbxError, ToolFault
from tbx_envs.handed_down import missing_hint
from tbx_envs.thinkingbox.servers.boolean_schemas import SchemaReader, restored
from tbx_envs.thinkingbox.servers.foreign_tools import Listing, listing_of
from tbx_envs.thinkingbox.servers.launcher import ClockSetting, Launcher, ServerProcess
from tbx_envs.thinkingbox.servers.servers_file import RemoteServer
from tbx_envs.thinkingbox.servers.wire import Completing, Wire
from tbx_envs.thinkingbox.supervision import children
from tbx_envs.version import __version__

_CLIENT = types.Implementation(name="tbx", version=__version__)
_MAX_PAGES = 100  # pages of a list of tools
_GRACE_S = 2.0  # for a process to end by itself once its stdin is closed
_END_S = 1.0  # for the status of a process that has closed its stdout
_REMOTE_SILENCE_S = 300.0  # on a stream of server-sent events, as in the original


class ServerLink:
    """One server of one session.

    Args:
        name: server name.
        how: launcher of its process, or address of a remote server.
        clock: clock of its process; None for the real clock.

    Attributes:
        name: server name.
        fault: error that ended the connection; None while it is open.
        listing: tools of the server, once it is open.
    """

    def __init__(self, name: str, how: Launcher | RemoteServer, clock: ClockSetting | None) -> None:
        self.name = name
        self.fault: ToolFault | None = None
        self.listing: Listing = Listing((), frozenset(), frozenset())
        self._how, self._clock = how, clock
        self._loop = asyncio.get_running_loop()
        self._process: ServerProcess | None = None
        self._wire: Wire | None = None
        self._session: ClientSession | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._leave = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._doing = "being started"

    async def open(self, deadline: float) -> None:
        """Start or reach the server, initialise the connection, list its tools.

        Args:
            deadline: time limit, on the clock of the loop.

        Raises:
            ToolFault: it does not start, breaks the protocol, or is not ready by the deadline.
            ConfigError: it cannot be started or reached as configured.
        """
        self._owner = self._loop.create_task(self._own())
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._opened)
        except TimeoutError:
            raise await self._failed("did not answer in time") from None

    async def ask(self, tool: str, arguments: Mapping[str, Any], *, limit_s: float) -> types.CallToolResult:
        """The result of one call of a tool, which is sent once.

        Raises:
            ToolFault: the server ended, broke the protocol, reported a failure, or did not answer in time.
            MCPError: the server reported invalid parameters.
        """
        if self.fault is not None:
            raise ToolFault(str(self.fault))
        assert self._session is not None, "a link must be open before it is called"
        self._doing = f"in a call of '{tool}'"
        params = types.CallToolRequestParams(name=tool, arguments=dict(arguments))
        try:
            async with asyncio.timeout(limit_s):
                return await self._session.send_request(types.CallToolRequest(params=params), types.CallToolResult)
        except TimeoutError:
            raise await self._failed(f"did not answer within {limit_s:g} s") from None
        except MCPError as error:
            if error.code == types.INVALID_PARAMS and not self._is_over():
                raise
            raise await self._failed(f"failed: {error}") from error
        except ValidationError as error:
            raise await self._failed(f"answered what is no result of a tool: {error}") from error

    def discard(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
        self._leave.set()
        if self._owner is not None and not self._opened.done():  # it is not waiting for `_leave` yet
            self._owner.cancel()

    async def finish(self, *, politely: bool) -> None:
        """End it, and wait until its process and connection are gone. Never raises.

        Args:
            politely: whether to wait a little for the process to end by itself.
        """
        process = self._process
        if process is not None and politely and self._wire is not None and self.fault is None:
            self._wire.half_close()
            await asyncio.wait([process.ended], timeout=_GRACE_S)
        self.discard()
        if self._owner is not None:
            _, late = await asyncio.wait([self._owner], timeout=_GRACE_S)  # with a goodbye to a remote server
            for owner in late:
                owner.cancel()
                await asyncio.wait([owner], timeout=_GRACE_S)
        if process is not None:
            await asyncio.wait([process.ended], timeout=_GRACE_S)
            if not process.ended.done():  # the program that would kill it is stopped or stuck
                children.kill(process.pid)
            process.errors.close()

    def forget(self) -> None:
        """Close all descriptors in a forked child."""
        if self._process is not None:
            self._process.forget()

    # --- the owner task -------------------------------------------------------------------------------------

    async def _own(self) -> None:
        """Keep the connection open until `_leave` is set."""
        try:
            async with self._streams() as (reader, writer):
                session = ClientSession(SchemaReader(reader), writer, message_handler=self._notice, client_info=_CLIENT)
                async with session:
                    self._session = session
                    await self._greet(session)
                    self._opened.set_result(None)
                    await self._leave.wait()
        except Exception as error:  # the process boundary: a server or its transport may raise anything
            await self._explain(error)
        finally:
            if self._wire is not None:
                self._wire.close()
            self._fail_opening(self.fault or ToolFault(f"server '{self.name}' was closed."))

    async def _explain(self, error: BaseException) -> None:
        """Keep the error that ended the connection as the fault."""
        cause = _innermost(error)
        if isinstance(cause, ToolFault | ConfigError) and not self._opened.done():
            self._fail_opening(cause)
            return
        if self.fault is None:
            await self._failed(f"failed: {type(cause).__name__}: {cause}")
        if self._wire is not None and isinstance(self._how, Launcher) and not self._opened.done():
            permanent = await self._how.permanent_error(self._clock)
            if permanent is not None:
                self._fail_opening(permanent)

    def _fail_opening(self, error: TbxError) -> None:
        """Make `open` raise, if it is still waiting."""
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # marks it as retrieved: it is fine if no one waits for it any more

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        if isinstance(self._how, Launcher):
            self._process = await self._how.start_process(self._clock)
            if self._leave.is_set():  # it was discarded while it was started
                self._process.kill()
            self._wire = Wire(self._process.link)
            yield self._wire.reader, self._wire.writer
        else:
            async with _remote_streams(self._how) as streams:
                yield Completing(streams[0]), streams[1]

    async def _greet(self, session: ClientSession) -> None:
        self._doing = "while it was greeted"
        await session.initialize()
        known = self._how.listings if isinstance(self._how, Launcher) and self._how.how == "fork" else None
        if known is not None and self._clock in known:
            self.listing = known[self._clock]
            return
        self._doing = "while it listed its tools"
        self.listing = listing_of(self.name, await _all_tools(session))
        if known is not None:
            known[self._clock] = self.listing

    async def _notice(self, message: Any) -> None:
        """Handle what the library passes on besides answers; an exception is an error of the transport."""
        if isinstance(message, Exception) and self.fault is None:
            await self._failed(f"broke its connection: {message}")
            self.discard()

    # --- faults -----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._wire is not None and self._wire.broken is not None

    async def _failed(self, what: str) -> ToolFault:
        """Keep and return the fault: the wire's reason, else `what`; how the process ended; the end of its stderr."""
        if self.fault is not None:
            return ToolFault(str(self.fault))
        process = self._process
        if self._is_over():
            assert self._wire is not None
            what = self._wire.broken or what
        ended = ""
        if process is not None and "closed its stdout" in what:
            await asyncio.wait([process.ended], timeout=_END_S)
            if process.ended.done():
                ended = f"; {process.describe_end()}"
        tail = "" if process is None else process.errors.text
        said = f" The last it wrote to stderr:\n{tail}" if tail else ""
        if process is not None:
            said += missing_hint(tail, process.launcher.server.environ)
        self.fault = ToolFault(f"server '{self.name}' {self._doing}: {what}{ended}. The episode is void.{said}")
        return self.fault


async def _all_tools(session: ClientSession) -> list[types.Tool]:
    tools: list[types.Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
        tools += map(restored, page.tools)
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise ToolFault(f"a server's list of tools has more than {_MAX_PAGES} pages.")


@contextlib.asynccontextmanager
async def _remote_streams(server: RemoteServer) -> AsyncIterator[tuple[Any, Any]]:
    if server.credential is not None:
        raise ConfigError(
            f"server '{server.name}' asks for credentials of type {server.credential.get('type')!r}, which tbx cannot "
            f"get. Put a token into its headers instead."
        )
    headers = dict(server.headers)
    if server.transport == "sse":
        from mcp.client.sse import sse_client

        async with sse_client(
            server.endpoint, headers=headers, timeout=server.timeout_s, sse_read_timeout=_REMOTE_SILENCE_S
        ) as streams:
            yield streams
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(server.timeout_s)) as client,
        streamable_http_client(server.endpoint, http_client=client) as streams,
    ):
        yield streams


def _innermost(error: BaseException) -> BaseException:
    """The first exception inside of groups, which the library's task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
