"""The original's HTTP session API on our servers: `tbx serve`. A client changes its address and nothing else.

    POST /session_create      {session_id, server_config, available_tools, timeout, always_json_output,
                               geteffects_proxy_info} -> answers of the servers' init
    POST /call_tool           {session_id, tool_name, arguments} -> the answer, a string
    POST /list_tools          {session_id} -> {"tools": {name: {"description", "inputSchema"}}}
    POST /get_effects         {session_id} -> {server: effects}
    POST /session_info        {session_id, update} -> information that the client stores there
    POST /session_destroy     {session_id} -> "Ok", also when it has ended already
    POST /session_destroy_all {} -> "Ok"
    POST /garbage_collect     {inactivity_minutes} -> {"count", "session_ids"}
    GET  /health              OK
         /mcp                 streamable HTTP MCP: tools of the session in the header X-TB-Session-Id

Answers are `{"success": bool, "content": {"type": "string" | "object", "value": ...}}`, as in the original.

**Access.** The agent's channels are `/mcp` and the tool names of `/call_tool`: no reserved name passes there. The
harness asks for effects itself, with the same client and the same optional bearer token. So without tokens (loopback
only) everything but reserved tools is open, and `tb infer` runs unchanged. With a privileged token the harness sends
that one; an agent that reaches this server over the network gets a second token, for `/mcp`, `/call_tool` and
`/list_tools`. The original's pseudo tool `__reserved__server_tool`, with which test code calls a server directly, needs
the privileged token: its client sends none, but accepts an address like `http://harness:TOKEN@127.0.0.1:8000`.

**Status codes.** The original's client retries after 429 (without limit), 401 (with a credential), and 502, 503, 504.
None of these ever follows a call that may have run: a call that failed or timed out is 400 with `success: false`, its
session has ended, and later requests to it are 400 too. Only `/session_create` answers 429, when there are too many
sessions and before anything was started.

Other differences: empty results, None and images are answers (as text), all text parts are kept, and effects that
cannot be read are an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any, TypeVar

import mcp_types
import pydantic
from mcp.server import Server, ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tbx_envs.doors import MAX_JSON_DEPTH, read_json, words_of
from tbx_envs.thinkingbox.api.live_sessions import Full, LiveSessions, SessionError, SessionOptions
from tbx_envs.version import __version__
from tbx_envs.web.access import Access, Gate, LocalRequests, denied
from tbx_envs.web.bodies import BodyTooLarge, read_body

SESSION_HEADER = "X-TB-Session-Id"
RESERVED = "__reserved__"
SERVER_TOOL = "__reserved__server_tool"
MAX_BODY_BYTES = 64 * 2**20
_SMALL_BODY_BYTES = 2**18

_log = logging.getLogger(__name__)

# Visible ASCII, since it travels in a header.
SessionId = Annotated[str, pydantic.StringConstraints(pattern=r"^[\x21-\x7e]{1,256}$")]


class _Asked(pydantic.BaseModel):
    """The body of a request. Unknown keys are ignored, as the original does."""


class _OfSession(_Asked):
    session_id: SessionId


class _Create(_OfSession):
    server_config: dict[str, dict[str, Any]]
    available_tools: list[str]
    timeout: float = pydantic.Field(default=120.0, gt=0, allow_inf_nan=False)
    always_json_output: bool = False
    geteffects_proxy_info: bool = False


class _Info(_OfSession):
    update: dict[str, Any] = pydantic.Field(default_factory=dict)


class _Call(_OfSession):
    tool_name: str
    arguments: dict[str, Any]


class _ServerTool(_Asked):
    server_name: str
    tool_name: str
    arguments: dict[str, Any]


class _Collect(_Asked):
    inactivity_minutes: float = pydantic.Field(ge=0, allow_inf_nan=False)


A = TypeVar("A", bound=_Asked)


class Rejected(Exception):
    """A request that is answered with an error status before it reaches a session."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def create_app(
    sessions: LiveSessions,
    access: Access,
    *,
    idle_s: float | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    any_host: bool = False,
) -> Starlette:
    """The application. When it ends, so do the sessions and their pool.

    Args:
        sessions: sessions of the clients.
        access: tokens of harness and agent.
        idle_s: time after which unused sessions are destroyed; None keeps them.
        max_body_bytes: maximum size of a request's body; a larger one is answered with 413.
        any_host: True to answer under any host name, for a server that other machines reach with a token.
    """
    api = _Api(sessions, max_body_bytes)
    manager = StreamableHTTPSessionManager(
        _mcp_server(sessions), json_response=True, stateless=True, max_request_body_size=max_body_bytes
    )
    mcp = StreamableHTTPASGIApp(manager)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        collecting = asyncio.ensure_future(sessions.collect_forever(idle_s)) if idle_s is not None else None
        async with manager.run():
            try:
                yield
            finally:
                if collecting is not None:
                    collecting.cancel()
                await sessions.shut_down()

    return Starlette(
        routes=[
            *(Route(path, handler, methods=["POST"]) for path, handler in api.routes()),
            Route("/health", _health, methods=["GET"]),
            Route("/mcp", mcp),
            Route("/mcp/", mcp),
        ],
        middleware=[
            Middleware(LocalRequests, refused=functools.partial(denied, 403), any_host=any_host),
            Middleware(Gate, access=access),
        ],
        lifespan=lifespan,
    )


async def _health(request: Request) -> Response:
    return PlainTextResponse("OK")


Handler = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Api:
    """The endpoints that accept and return JSON."""

    sessions: LiveSessions
    max_body_bytes: int

    def routes(self) -> list[tuple[str, Handler]]:
        return [
            ("/session_create", self._route(_Create, self._create)),
            ("/session_destroy", self._route(_OfSession, self._destroy)),
            ("/session_destroy_all", self._route(_Asked, self._destroy_all)),
            ("/session_info", self._route(_Info, self._info)),
            ("/call_tool", self._route(_Call, self._call)),
            ("/get_effects", self._route(_OfSession, self._effects)),
            ("/list_tools", self._route(_OfSession, self._tools)),
            ("/garbage_collect", self._route(_Collect, self._collect)),
        ]

    def _route(self, record: type[A], answer: Callable[[A, bool], Awaitable[str | dict[str, Any]]]) -> Handler:
        """The process boundary: every outcome becomes a reply, and never one that makes the client retry a call."""

        async def handle(request: Request) -> Response:
            try:
                asked = await self._asked(request, record)
                return _reply(await answer(asked, request.state.privileged))
            except Rejected as rejected:
                return _reply(rejected.message, rejected.status)
            except Full as full:
                return _reply(str(full), 429, {"Retry-After": "1"})
            except SessionError as error:
                _log.info("%s: %s", request.url.path, error)
                return _reply(str(error), 400)
            except ClientDisconnect:
                return _reply("the client went away before its request was read", 400)
            except Exception as error:
                _log.exception("%s broke", request.url.path)
                return _reply(f"tbx serve broke on this request ({words_of(error)})", 400)

        return handle

    async def _asked(self, request: Request, record: type[A]) -> A:
        try:
            body = await read_body(request, self.max_body_bytes)
        except BodyTooLarge as error:
            raise Rejected(413, f"Invalid input: {error}") from error
        try:
            read = functools.partial(read_json, body, max_depth=MAX_JSON_DEPTH, clean=record is not _Call)
            # Parsing a large body must not keep the other sessions waiting; a thread for a small one would cost more.
            return record.model_validate(read() if len(body) <= _SMALL_BODY_BYTES else await asyncio.to_thread(read))
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
            raise Rejected(400, f"Invalid input: {problems}") from error
        except ValueError as error:
            raise Rejected(400, f"Invalid input: no JSON that is served ({error})") from error

    async def _create(self, asked: _Create, privileged: bool) -> dict[str, Any]:
        options = SessionOptions(
            tools=tuple(asked.available_tools),
            timeout_s=asked.timeout,
            always_json_output=asked.always_json_output,
            proxy_info=asked.geteffects_proxy_info,
        )
        return await self.sessions.create(asked.session_id, asked.server_config, options)

    async def _destroy(self, asked: _OfSession, privileged: bool) -> str:
        await self.sessions.destroy(asked.session_id)
        return "Ok"

    async def _destroy_all(self, asked: _Asked, privileged: bool) -> str:
        await self.sessions.destroy_all()
        return "Ok"

    async def _info(self, asked: _Info, privileged: bool) -> dict[str, Any]:
        return await self.sessions.info(asked.session_id, asked.update, self.max_body_bytes)

    async def _call(self, asked: _Call, privileged: bool) -> str:
        if not asked.tool_name.startswith(RESERVED):
            return await self.sessions.call(asked.session_id, asked.tool_name, asked.arguments)
        if not privileged:
            raise Rejected(
                403,
                f"Tool {asked.tool_name} is reserved: an agent must not reach it. Start tbx serve with a privileged "
                f"token (--token-env) and send that; clients that send none take http://harness:TOKEN@host:port.",
            )
        if asked.tool_name != SERVER_TOOL:
            raise SessionError(f"Tool {asked.tool_name} does not exist")
        try:
            tool = _ServerTool.model_validate(asked.arguments)
        except pydantic.ValidationError as error:
            raise Rejected(400, f"{SERVER_TOOL} takes server_name, tool_name and arguments (an object)") from error
        return await self.sessions.call_reserved(asked.session_id, tool.server_name, tool.tool_name, tool.arguments)

    async def _effects(self, asked: _OfSession, privileged: bool) -> dict[str, Any]:
        return await self.sessions.effects(asked.session_id)

    async def _tools(self, asked: _OfSession, privileged: bool) -> dict[str, Any]:
        tools = await self.sessions.tools(asked.session_id)
        return {
            "tools": {
                name: {"description": tool.description, "inputSchema": dict(tool.input_schema)}
                for name, tool in tools.items()
            }
        }

    async def _collect(self, asked: _Collect, privileged: bool) -> dict[str, Any]:
        ended = await self.sessions.collect(asked.inactivity_minutes * 60)
        return {"count": len(ended), "session_ids": ended}


def _reply(value: str | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = {"type": "string" if isinstance(value, str) else "object", "value": value}
    try:
        # ASCII, since a tool's answer may contain half of a surrogate pair.
        body = json.dumps({"success": status == 200, "content": content}, allow_nan=False)
    except ValueError as error:
        return _reply(f"the answer has no JSON form ({error})", 400)
    return Response(body, status, headers, media_type="application/json")


def _mcp_server(sessions: LiveSessions) -> Server[Any]:
    """The tools of the session that the request's header names. Results are text, and also an object if it is JSON."""

    async def list_tools(
        context: ServerRequestContext[Any], params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        with _as_mcp_errors():
            tools = await sessions.tools(_session_id(context))
        return mcp_types.ListToolsResult(
            tools=[
                mcp_types.Tool(name=name, description=tool.description, input_schema=dict(tool.input_schema))
                for name, tool in tools.items()
            ]
        )

    async def call_tool(
        context: ServerRequestContext[Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        with _as_mcp_errors():
            text = await sessions.call(_session_id(context), params.name, params.arguments or {})
        return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=text)], structured_content=_object_in(text))

    server: Server[Any] = Server("tbx", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
    server.middleware.clear()  # its one default traces every call for OpenTelemetry
    return server


@contextlib.contextmanager
def _as_mcp_errors() -> Iterator[None]:
    try:
        yield
    except SessionError as error:
        raise MCPError(code=mcp_types.INVALID_PARAMS, message=str(error)) from error


def _session_id(context: ServerRequestContext[Any]) -> str:
    given = context.request.headers.get(SESSION_HEADER) if context.request is not None else None
    if not given:
        raise SessionError(f"Missing {SESSION_HEADER} header")
    return str(given)


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
