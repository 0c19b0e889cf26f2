"""The JSON object of a call, read strictly: what a tool could not take, and what is ambiguous, is an error.

Errors are: the same key twice, NaN and infinities, integers beyond 64 bits, half of a surrogate pair, nesting deeper
than 32, any JSON value but an object, unknown keys.

The model reads the text of these errors: changing it changes the benchmark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_NESTING = 32
MAX_INTEGER = 2**63 - 1  # what a database column can hold


class Unreadable(ValueError):
    """A call that cannot be read; the model reads the message."""


def decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` (after white space) and where it ends.

    Raises:
        json.JSONDecodeError: there is no JSON at `start`. Do not pass its message on: it differs between versions of
            Python.
        Unreadable: JSON that is not accepted.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_space(text, start))
    except RecursionError:
        raise Unreadable(f"The call is nested deeper than {MAX_NESTING} levels.") from None
    _require_usable(value)
    return value, end


def skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


def name_and_arguments(payload: Any, key: str = "arguments") -> tuple[str, Mapping[str, Any]]:
    """The call that a JSON value describes.

    Args:
        payload: decoded JSON value.
        key: key of the arguments; missing or null means no arguments, and a string may hold the object.

    Raises:
        Unreadable: the value is not a call.
    """
    if not isinstance(payload, dict):
        raise Unreadable(f"A call is one JSON object with a name and {key}, not {_kind(payload)}.")
    unknown = [other for other in payload if other not in ("name", key)]
    if unknown:
        raise Unreadable(f"A call has only the keys name and {key}, not {unknown[0][:40]!r}.")
    name = payload.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Unreadable("The call has no name. Give the tool's name as a string.")
    arguments = payload.get(key)
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _decode_whole(arguments, key)
    if not isinstance(arguments, dict):
        raise Unreadable(f"The {key} are one JSON object, not {_kind(arguments)}.")
    return name.strip(), arguments


def call_in(payload: Any, key: str) -> tuple[str, Mapping[str, Any], bool]:
    """As `name_and_arguments`, in the spellings of other formats too; True where it is one of them.

    They are `parameters` for `arguments` and the reverse, and OpenAI's `{"type": "function", "function": {...}}`.

    Raises:
        Unreadable: the value is not a call.
    """
    lenient = False
    if isinstance(payload, dict) and payload.get("type") == "function" and set(payload) <= {"type", "id", "function"}:
        payload, lenient = payload.get("function"), True
    if isinstance(payload, dict):
        other = "parameters" if key == "arguments" else "arguments"
        if other in payload and key not in payload:
            key, lenient = other, True
    return *name_and_arguments(payload, key), lenient


def _decode_whole(text: str, key: str) -> Any:
    try:
        value, end = decode(text, 0)
    except ValueError:
        value, end = None, 0
    if not isinstance(value, dict) or text[end:].strip():
        raise Unreadable(f"The {key} are a string that holds no JSON object. Write the object itself.")
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _require_usable(value: Any) -> None:
    """Raises `Unreadable` on nesting that would exhaust a recursive reader and on strings that cannot be encoded."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        if any(isinstance(item, str) and _is_half_a_character(item) for item in level):
            raise Unreadable("A string holds half of a character (a lone surrogate).")
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += [*item, *item.values()]
            elif isinstance(item, list):
                children += item
        level = children
        if not level:
            return
    raise Unreadable(f"The call is nested deeper than {MAX_NESTING} levels.")


def _is_half_a_character(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise Unreadable(f"The key {key[:40]!r} is given twice.")
        seen.add(key)
    return dict(pairs)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Unreadable(f"The number {digits[:20]} is too large.")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MAX_INTEGER:
        raise Unreadable(f"The number {digits[:20]} is too large.")
    return int(digits)


def _constant(name: str) -> float:
    raise Unreadable(f"{name} is not a JSON number.")


# Line breaks inside strings are accepted (strict=False): models write them, and the meaning is clear.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant, strict=False
)
