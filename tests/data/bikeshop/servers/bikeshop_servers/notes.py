"""MCP server `notes`: a notebook. It shares the tool `add_note` with `bikes`, has no init, and asks for session ids."""

from __future__ import annotations

import json
from typing import Any

from mcp.server import MCPServer

server = MCPServer("notes", log_level="WARNING")
tool = server.tool
notes: list[dict[str, Any]] = []


@tool(name="__reserved__geteffects", structured_output=False)
async def effects(session_id: str) -> str:
    """What the session did."""
    return json.dumps({"session_id": session_id, "notes": notes})


@tool(name="__reserved__teardown", structured_output=False)
async def teardown(session_id: str) -> str:
    """Nothing to leave behind."""
    return json.dumps({"status": "ok", "session_id": session_id})


@tool(structured_output=False)
async def list_notes(customer_id: str) -> str:
    """List the notes on a customer."""
    return json.dumps([note for note in notes if note["customer_id"] == customer_id])


@tool(structured_output=False)
async def add_note(customer_id: str, text: str) -> str:
    """Write into the notebook."""
    notes.append({"customer_id": customer_id, "text": text})
    return json.dumps({"notes": len(notes)})


if __name__ == "__main__":
    server.run("stdio")
