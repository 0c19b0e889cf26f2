"""Schemas that are `true` or `false`, past the MCP library and back.

JSON Schema allows both (`true` is any value), and servers publish them. Version 2.0 of the library takes only mappings
for the schemas of a tool's properties, and refuses the whole list of tools; so they travel through it as mappings.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import mcp_types as types
from mcp.shared.message import SessionMessage

_MARK = "tbx/boolean-schema"


class SchemaReader:
    """A stream of a server's messages, in which boolean schemas of tools are replaced.

    Args:
        reader: stream of the messages as they came.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    async def receive(self) -> SessionMessage | Exception:
        return _replaced(await self._reader.receive())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return _replaced(await anext(self._reader))

    async def aclose(self) -> None:
        await self._reader.aclose()

    async def __aenter__(self) -> Self:
        await self._reader.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._reader.__aexit__(kind, error, trace)


def _replaced(item: SessionMessage | Exception) -> SessionMessage | Exception:
    message = None if isinstance(item, Exception) else item.message
    tools = message.result.get("tools") if isinstance(message, types.JSONRPCResponse) else None
    for tool in tools if isinstance(tools, list) else []:
        for part in ("inputSchema", "outputSchema"):
            properties = _properties(tool.get(part)) if isinstance(tool, dict) else {}
            properties.update(
                {name: {_MARK: schema} for name, schema in properties.items() if isinstance(schema, bool)}
            )
    return item


def restored(tool: types.Tool) -> types.Tool:
    """The tool with its input's schemas as the server wrote them."""
    properties = _properties(tool.input_schema)
    for name, schema in properties.items():
        if isinstance(schema, Mapping) and _MARK in schema:
            properties[name] = schema[_MARK]
    return tool


def _properties(schema: Any) -> dict[str, Any]:
    """The properties of a schema, to be changed in place; empty where there are none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}
