"""An MCP server over stdio that writes every execution of `book` into a file before it answers."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from mcp.server import MCPServer

server = MCPServer("counting")
state: dict[str, Any] = {"booked": 0, "session": None}


@server.tool(name="__reserved__init")
def init(session_id: str, config: dict[str, Any]) -> str:
    state.update(config, session=session_id)
    return json.dumps({"status": "ok", "log": config.get("log")})


@server.tool()
def book(seat: str, wait_s: float) -> str:
    """Book a seat."""
    with open(state["log"], "a") as log:
        log.write(f"{seat}\n")
    time.sleep(wait_s)
    state["booked"] += 1
    return json.dumps({"booked": seat})


@server.tool()
def environment() -> str:
    """What the server inherited."""
    return json.dumps(dict(os.environ))


@server.tool(structured_output=False)
def nothing() -> None:
    """Answer nothing at all."""


@server.tool(name="__reserved__geteffects")
def effects() -> str:
    return "not JSON" if state.get("effects") == "bad" else json.dumps(state)


if __name__ == "__main__":
    server.run()
