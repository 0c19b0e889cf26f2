"""Converts values that were written without types to the types of the tool's schema.

    schema allows            the text                   becomes
    string                   anything                   the text as it is
    integer, number          35, 3.5, 35.0              35, 3.5, 35 where only integers are allowed
    boolean                  true, True                 True
    null                     null, None                 None
    array, object            JSON of one                the list or object
    several of these         null, an array, an object  that; else the text if strings are allowed; else what fits
    nothing, or anything     anything                   the text as it is

A value that fits none of the types stays text: the check of the arguments then names the argument and the problem.
Some templates write `True` and `None` for `true` and `null`. One value cannot be expressed in such a format: the
*string* "null" where null is allowed too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tbx_envs.chat.payload import decode

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NAMES = {bool: "boolean", type(None): "null", int: "integer", float: "number", str: "string"}
_MAX_DEPTH = 16  # references from schema to schema that are followed


def typed_arguments(written: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call, each in the type that `schema`, the JSON schema of all arguments, gives it."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(text, _types(known.get(name), schema)) for name, text in written.items()}


def _typed(text: str, types: frozenset[str]) -> Any:
    value = _json_value(text.strip())
    kind = _NAMES.get(type(value), "array" if isinstance(value, list) else "object")
    if kind in ("null", "array", "object") and kind in types:
        return value
    if not types or "string" in types:
        return text
    if kind == "integer" and types & {"integer", "number"}:
        return value
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return int(value)
    return value if kind in types else text


def _json_value(text: str) -> Any:
    """The JSON value of `text`; the text itself where it is not JSON."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        value, end = decode(text, 0)
    except ValueError:  # not JSON, or JSON that no tool could take
        return text
    return text if text[end:] or isinstance(value, str) else value


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that `schema` allows; empty when it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if "type" in schema:
        named = schema["type"]
        return frozenset([named] if isinstance(named, str) else _strings(named))
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(reference, root), root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(union), list) and options:
            found = [_types(option, root, depth + 1) for option in options]
            return frozenset().union(*found) if all(found) else frozenset()
    members = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_NAMES.get(type(member), "array" if isinstance(member, list) else "object") for member in members)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a reference such as `#/$defs/Address` names, or None."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _strings(values: Any) -> Iterable[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list | tuple) else []
