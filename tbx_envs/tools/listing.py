"""Tools as a policy reads them: one canonical form, independent of the transport.

The order of tools is the server's, which every transport keeps. The keys and properties of a schema get a fixed order
here, since JSON libraries on the way may change it and prompts are made from the result.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from tbx_envs.tools.tool import Tool

_KEYS = ("type", "description", "enum", "items", "properties", "required", "additionalProperties")


def function_dicts(tools: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """(name, description, schema) -> OpenAI-function style dictionaries, new objects each time."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": canonical_schema(schema)},
        }
        for name, description, schema in tools
    ]


def domain_function_dicts(tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """The same for a built-in domain's tools, without asking a server; a test compares the two."""
    entry = _pickled.get(id(tools))
    if entry is None or entry[0] is not tools:
        dicts = function_dicts((tool.name, tool.description, tool.input_schema) for tool in tools)
        entry = _pickled[id(tools)] = (tools, pickle.dumps(dicts))
    return list(pickle.loads(entry[1]))


# The dictionaries of a domain's tools, pickled because that is the fastest deep copy, and every reset needs new ones.
# Keyed by identity (schemas do not hash); the stored tuple pins the id.
_pickled: dict[int, tuple[tuple[Tool, ...], bytes]] = {}


def canonical_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy with keys in the order of `_KEYS`, then other keys by name.

    Properties are in the order of `required`, then the optional ones by name.
    """
    copy: dict[str, Any] = {}
    for key in sorted(schema, key=lambda key: (_KEYS.index(key) if key in _KEYS else len(_KEYS), key)):
        value = schema[key]
        if key == "properties" and isinstance(value, Mapping):
            required = list(schema.get("required", ()))
            names = [name for name in required if name in value] + sorted(set(value) - set(required))
            copy[key] = {name: canonical_schema(value[name]) for name in names}
        elif isinstance(value, Mapping):
            copy[key] = canonical_schema(value)
        else:
            copy[key] = list(value) if isinstance(value, list | tuple) else value
    return copy
