"""MCP server over HTTP on loopback: `python -m bikeshop_servers.remote streamable-http|sse LOG`.

Prints its port, and writes a line into LOG for each call and for each request's `X-Shop` header.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

import uvicorn
from mcp.server import MCPServer


def build(log: str) -> MCPServer:
    server = MCPServer("remote", log_level="CRITICAL")

    def note(line: str) -> None:
        with open(log, "a") as file:
            file.write(line + "\n")

    @server.tool(name="__reserved__init", structured_output=False)
    async def initialise(config: dict[str, Any]) -> str:
        return json.dumps({"status": "ok", "told": config})

    @server.tool(name="__reserved__geteffects", structured_output=False)
    async def effects() -> str:
        return json.dumps({"shop": "open"})

    @server.tool(structured_output=False)
    async def order(item: str) -> str:
        """Order something."""
        note(f"order {item}")
        return f"ordered {item}"

    @server.tool(structured_output=False)
    def hang(item: str) -> str:
        """Wait."""
        note(f"hang {item}")
        time.sleep(600)
        return "late"

    return server


def main(transport: str, log: str) -> None:
    server = build(log)
    inner = server.sse_app() if transport == "sse" else server.streamable_http_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            with open(log, "a") as file:
                file.write(f"header {dict(scope['headers']).get(b'x-shop', b'').decode()}\n")
        await inner(scope, receive, send)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_config=None)).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
