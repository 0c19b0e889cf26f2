"""Listings and answers of external servers, in the form that tasks and agents read.

All wording that the contract with such servers prescribes is in this module.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types as types

from tbx_envs.doors import read_json
from tbx_envs.errors import ToolFault
from tbx_envs.tools.session import ServedTool

RESERVED = "__reserved__"  # prefix of the names of tools that no agent may see
INIT, EFFECTS, TEARDOWN = RESERVED + "init", RESERVED + "geteffects", RESERVED + "teardown"
_DEFINITIONS = "#/$defs/"
_MOST_NODES = 20_000  # of a schema without references; one that would be larger keeps its references


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
        ToolFault: a name appears twice, or a schema refers to what is not there.
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

    The target replaces a reference and all keys beside it, as in the original. A reference inside of its own target
    stays, and with it the entry of `$defs` that it names: so a tree has its first level written out. A schema that
    would become too large, since its references multiply, keeps them all.

    Raises:
        ToolFault: a reference has no target.
    """
    try:
        published = _Inlining(server, tool, schema).published()
    except (_Multiplies, RecursionError):
        published = dict(schema)
    published.pop("title", None)
    properties = published.get("properties")
    if isinstance(properties, dict):
        published["properties"] = {
            name: {key: value for key, value in entry.items() if key != "title"} if isinstance(entry, dict) else entry
            for name, entry in properties.items()
        }
    return dict(published)


class _Multiplies(Exception):
    """A schema that is far larger without its references than with them."""


class _Inlining:
    """Writes one schema without the references that can be replaced."""

    def __init__(self, server: str, tool: str, schema: Mapping[str, Any]) -> None:
        self._of = f"server '{server}', tool '{tool}'"
        self._schema = schema
        self._num_nodes = 0
        self._kept: list[str] = []  # references inside of their own target

    def published(self) -> dict[str, Any]:
        made = self._inlined({key: value for key, value in self._schema.items() if key != "$defs"}, ("#",))
        definitions: dict[str, Any] = {}
        for reference in self._kept:  # which grows while their targets are written
            name = reference.removeprefix(_DEFINITIONS).partition("/")[0]
            if reference.startswith(_DEFINITIONS) and _unescaped(name) not in definitions:
                target = _DEFINITIONS + name
                definitions[_unescaped(name)] = self._inlined(self._named(target), ("#", target))
        return {**made, "$defs": definitions} if definitions else made

    def _inlined(self, node: Any, inside: tuple[str, ...]) -> Any:
        self._num_nodes += 1
        if self._num_nodes > _MOST_NODES:
            raise _Multiplies
        if isinstance(node, Mapping):
            if isinstance(reference := node.get("$ref"), str):
                if reference in inside:
                    self._kept.append(reference)
                    return {"$ref": reference}
                return self._inlined(self._named(reference), (*inside, reference))
            return {key: self._inlined(value, inside) for key, value in node.items()}
        return [self._inlined(item, inside) for item in node] if isinstance(node, list) else node

    def _named(self, reference: str) -> Any:
        node: Any = self._schema
        if reference != "#" and not reference.startswith("#/"):
            node = None
        for part in reference.split("/")[1:]:
            node = node.get(_unescaped(part)) if isinstance(node, Mapping) else None
        if node is None:
            raise ToolFault(f"{self._of}: its schema refers to {reference!r}, which is missing.")
        return node


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def result_text(result: types.CallToolResult, *, first_part_only: bool = False) -> str:
    """The text that the model reads: the text parts, one below the other, and descriptions of other parts. A result
    without parts is the JSON of its `structuredContent`, where it has that.

    The original keeps only the first part, and gives up the whole episode if that is missing or not text.

    Args:
        result: result of the call.
        first_part_only: keep only the first part, to compare with results of the original.
    """
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
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
    """The JSON object in the first part of a reserved tool's result, or in `structuredContent` where it has no part.

    Raises:
        ValueError: there is no such object; the message says what is there instead.
    """
    structured = not result.content and result.structured_content is not None
    first = types.TextContent(text=result_text(result)) if structured else next(iter(result.content), None)
    if not isinstance(first, types.TextContent):
        raise ValueError("nothing that could be read")
    text = first.text
    try:
        value = read_json(text)
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
