"""MCP server `bikes`: the rental desk. Every tool answers one JSON text; a refusal is `{"error": ..., "tool": ...}`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from mcp.server import MCPServer

from bikeshop_servers.search import Policy
from bikeshop_servers.shop import Refused, Shop

server = MCPServer("bikes", log_level="WARNING")
tool = server.tool
shop = Shop()
golden_shop = Shop()
rubrics: list[str] = []
policy: Policy | None = None


@tool(name="__reserved__init", structured_output=False)
async def initialise(config: dict[str, Any]) -> str:
    """Set the session up: data_patch, golden_test_case, sources, rubrics_yesno."""
    global policy
    try:
        for each in (shop, golden_shop):
            each.patch(config.get("data_patch") or {})
        golden_shop.replay((config.get("golden_test_case") or {}).get("tool_interactions", []))
        rubrics.extend(config.get("rubrics_yesno") or [])
        if config.get("sources"):
            policy = Policy(config["sources"])
    except Exception as error:
        return json.dumps({"status": "error", "message": str(error), "traceback": traceback.format_exc()})
    return json.dumps({})


@tool(name="__reserved__geteffects", structured_output=False)
async def effects() -> str:
    """What the session did."""
    return json.dumps(
        {
            "result_db_hash": shop.digest(),
            "golden_db_hash": golden_shop.digest(),
            "diff": shop.differences(golden_shop),
            "rubrics_yesno": rubrics,
        }
    )


@tool(name="__reserved__teardown", structured_output=False)
async def teardown() -> str:
    """Leave nothing behind."""
    if policy is not None:
        policy.delete()
    return json.dumps({"status": "ok"})


def answered(name: str, make: Callable[[], Any]) -> str:
    try:
        return json.dumps(make())
    except Refused as reason:
        return json.dumps({"error": f"Tool execution failed: {reason}", "tool": name})


@tool(structured_output=False)
async def find_customer(email: str) -> str:
    """Find a customer by email address."""
    return answered("find_customer", lambda: shop.find_customer(email))


@tool(structured_output=False)
async def list_bikes(kind: str | None = None, station: str | None = None) -> str:
    """List bikes, all or of one kind (city, cargo, kids) or station (north, south)."""
    return answered("list_bikes", lambda: shop.list_bikes(kind, station))


@tool(structured_output=False)
async def get_rental(rental_id: str) -> str:
    """Show a rental."""
    return answered("get_rental", lambda: shop.get_rental(rental_id))


@tool(structured_output=False)
async def start_rental(customer_id: str, bike_id: str, days: int) -> str:
    """Lend a free bike to a verified customer, for 1 to 14 days."""
    return answered("start_rental", lambda: shop.start_rental(customer_id, bike_id, days))


@tool(structured_output=False)
async def end_rental(rental_id: str, damage: bool = False) -> str:
    """Take a bike back; a damaged one goes to repair."""
    return answered("end_rental", lambda: shop.end_rental(rental_id, damage))


@tool(structured_output=False)
async def refund(rental_id: str, amount: float) -> str:
    """Pay back part of a rental's price, or all of it."""
    return answered("refund", lambda: shop.refund(rental_id, amount))


@tool(structured_output=False)
async def update_customer(customer_id: str, phone: str) -> str:
    """Change a customer's phone number."""
    return answered("update_customer", lambda: shop.update_customer(customer_id, phone))


@tool(structured_output=False)
async def add_note(customer_id: str, text: str) -> str:
    """Write a note on a customer."""
    return answered("add_note", lambda: shop.add_note(customer_id, text))


@tool(structured_output=False)
async def get_today() -> str:
    """Tell the date and the time."""
    return json.dumps({"today": date.today().isoformat(), "now": datetime.now(UTC).isoformat()})


@tool(structured_output=False)
async def search_policy(query: str, max_results: int = 3) -> str:
    """Search the shop's policy."""
    if policy is None:
        return json.dumps({"error": "Tool execution failed: there is no policy", "tool": "search_policy"})
    return json.dumps({"snippets": policy.search(query, max_results)})


if __name__ == "__main__":
    server.run("stdio")
