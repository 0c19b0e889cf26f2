"""Listings and answers of external servers, in the form that tasks and agents read.

All wording that the contract with such servers prescribes is in this module.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types as types

from tbx_envs.errors import ToolFault
from tbx_envs.tools.session import ServedTool

RESERVED = "__reserved__"  # prefix of the names of tools that no agent may see
INIT, EFFECTS, TEARDOWN = RESERVED + "init", RESERVED + "geteffects", RESERVED + "teardown"


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The tools of one server.

    Attributes:
        tools: tools without the reserved ones, in the server's order.
        names: names of all tools.
        wants_session: names of the tools whose schema has a `session_id`.
    """

    tools: tuple[ServedTool, ...]
    names: frozenset[str]
    wants_session: frozenset[str]


def listing_of(server: str, listed: Sequence[types.Tool]) -> Listing:
    """The tools that a server listed, as they are published.

    Raises:
        ToolFault: a name appears twice, or a schema cannot be written without references.
    """
    names = [tool.name for tool in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ToolFault(f"server '{server}' lists {', '.join(map(repr, twice))} more than once.")
    tools = tuple(
        ServedTool(tool.name, server, tool.description or "", published_schema(server, tool.name, tool.input_schema))
        for tool in listed
        if not tool.name.startswith(RESERVED)
    )
    wants_session = {tool.name for tool in listed if "session_id" in (tool.input_schema.get("properties") or {})}
    return Listing(tools, frozenset(names), frozenset(wants_session))


def published_schema(server: str, tool: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with references replaced by their targets, without `$defs`, and without its `title` and the `title`s
    of its properties.

    The target replaces a reference and all keys beside it, as in the original.

    Raises:
        ToolFault: a reference has no target, or is inside of its own target.
    """

    def inlined(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, Mapping):
            if isinstance(reference := node.get("$ref"), str):
                if reference in inside:
                    raise ToolFault(f"server '{server}', tool '{tool}': its schema refers to itself by {reference!r}.")
                return inlined(_named(reference), (*inside, reference))
            return {key: inlined(value, inside) for key, value in node.items()}
        return [inlined(item, inside) for item in node] if isinstance(node, list) else node

    def _named(reference: str) -> Any:
        node: Any = schema
        if reference != "#" and not reference.startswith("#/"):
            node = None
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is None:
            raise ToolFault(f"server '{server}', tool '{tool}': its schema refers to {reference!r}, which is missing.")
        return node

    published = inlined({key: value for key, value in schema.items() if key != "$defs"}, ("#",))
    published.pop("title", None)
    properties = published.get("properties")
    if isinstance(properties, dict):
        published["properties"] = {
            name: {key: value for key, value in entry.items() if key != "title"} if isinstance(entry, dict) else entry
            for name, entry in properties.items()
        }
    return dict(published)


def result_text(result: types.CallToolResult, *, first_part_only: bool = False) -> str:
    """The text that the model reads: the text parts, one below the other, and descriptions of other parts.

    The original keeps only the first part, and gives up the whole episode if that is missing or not text.

    Args:
        result: result of the call.
        first_part_only: keep only the first part, to compare with results of the original.
    """
    parts = result.content[:1] if first_part_only else result.content
    return "\n".join(_part_text(part) for part in parts)


def _part_text(part: Any) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.ImageContent() | types.AudioContent():
            kind = "image" if isinstance(part, types.ImageContent) else "audio"
            return f"[{kind} that cannot be shown: {part.mime_type}, {len(part.data) * 3 // 4} bytes]"
        case types.ResourceLink():
            return f"[link to {part.uri}: {part.description or part.title or part.name}]"
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource():
            return f"[resource that cannot be shown: {part.resource.uri}, {part.resource.mime_type or 'unknown type'}]"
    return f"[content of type {part.type!r} that cannot be shown]"


def first_object(result: types.CallToolResult) -> Mapping[str, Any]:
    """The JSON object in the first part of a reserved tool's result.

    Raises:
        ValueError: there is no such object; the message says what is there instead.
    """
    text = result.content[0].text if result.content and isinstance(result.content[0], types.TextContent) else None
    if text is None:
        raise ValueError("nothing that could be read")
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError(f"{_shown(text)}, which is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{_shown(text)}, which is no JSON object")
    return value


def init_object(result: types.CallToolResult) -> Mapping[str, Any]:
    """The answer of `__reserved__init` without its status.

    Raises:
        ValueError: the answer does not report success: it is neither `{}` nor has the `status` "ok".
    """
    value = dict(first_object(result))
    if (value and value.pop("status", None) != "ok") or result.is_error:
        raise ValueError(_shown(json.dumps(first_object(result))))
    return value


def effects_object(result: types.CallToolResult) -> Mapping[str, Any]:
    """The answer of `__reserved__geteffects`.

    Raises:
        ValueError: the answer is not a JSON object, or reports a failure.
    """
    value = first_object(result)
    if result.is_error or value.get("status") == "error":
        raise ValueError(_shown(json.dumps(value)))
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 2000 else text[:2000] + "...")
