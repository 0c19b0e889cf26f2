"""A domain as a low-level MCP server. The same handlers answer in process and over stdio, so the texts are equal.

The protocol has one flag, `is_error`, for a tool that says no, for wrong arguments and for a tool that broke. They are
distinguished here, before the protocol sees them: rejected and invalid calls are results whose `_meta` has
`STATUS_KEY`; a fault is raised and becomes a protocol error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mcp_types as types
from mcp.server import Server

from tbx_envs.domains import Domain
from tbx_envs.errors import ToolFault
from tbx_envs.tools.session import Answer
from tbx_envs.version import __version__

STATUS_KEY = "tbx/status"


def build_server(
    name: str, domain: Callable[[], Domain], answer: Callable[[str, dict[str, Any]], Answer]
) -> Server[Any]:
    """A server that lists the tools of `domain()` and answers calls with `answer(tool name, arguments)`.

    Both are called at each request, so that one server can serve many episodes.
    """

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=tool.name, description=tool.description, input_schema=dict(tool.input_schema))
                for tool in domain().tools
            ]
        )

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        answered = answer(params.name, params.arguments or {})
        return types.CallToolResult(
            content=[types.TextContent(text=answered.text)],
            is_error=answered.status != "ok",
            _meta={STATUS_KEY: answered.status},
        )

    server: Server[Any] = Server(name, version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
    server.middleware.clear()  # its one default traces every call for OpenTelemetry, a sixth of a call's time
    return server


def read_result(result: types.CallToolResult) -> Answer:
    """The answer that a result of our server carries.

    Raises:
        ToolFault: the result is not one of ours, so a rejected call cannot be distinguished from a fault.
    """
    status = (result.meta or {}).get(STATUS_KEY)
    if status not in ("ok", "rejected", "invalid"):
        raise ToolFault(
            f"a tool server answered without '{STATUS_KEY}' in its _meta (got {status!r}), so a rejected call cannot "
            f"be distinguished from a fault. Serve the domain with tbx."
        )
    return Answer("".join(block.text for block in result.content if isinstance(block, types.TextContent)), status)
