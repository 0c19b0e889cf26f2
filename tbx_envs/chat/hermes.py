"""The `hermes` format: `<tool_call>{"name": "find_patient", "arguments": {"name": "Ada"}}</tool_call>`.

Several calls in a turn are executed in order; words around them are kept as text. How strictly it is read:

- A call is one JSON object, read from the opening tag on: braces and closing tags inside strings are data.
- `arguments` may be missing or null (none), and may be a string that holds a JSON object.
- A complete object whose closing tag is missing is accepted at the end of the turn and before another call.
- Everything else is a `BadCall`: broken JSON, another kind of JSON, an unknown key, the same key twice (which
  one is meant cannot be known), NaN and infinities, integers beyond 64 bits, half of a surrogate pair,
  nesting deeper than 32, more text between the object and the closing tag.
- A call that cannot be read reaches to the next closing tag or to the end; one quoted inside is not executed.

The words of a problem are read by the model: a change of them is a change of the benchmark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN, split_reasoning
from tbx_envs.messages import BadCall, ToolCall, Turn

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MAX_NESTING = 32
MAX_INTEGER = 2**63 - 1  # what a database column can hold


def parse(raw: str, ids: Iterator[str]) -> Turn:
    """The turn that `raw` says; `ids` gives the calls their ids. Never raises, whatever the text."""
    reasoning, visible = split_reasoning(raw, CALL_OPEN, _payload_end)
    words: list[str] = []
    calls: list[ToolCall | BadCall] = []
    position = 0
    while (tag := visible.find(CALL_OPEN, position)) >= 0:
        words.append(visible[position:tag])
        call, position = _read_call(visible, tag, next(ids))
        calls.append(call)
    words.append(visible[position:])
    text = "\n".join(stripped for piece in words if (stripped := piece.strip()))
    return Turn(text=text, calls=tuple(calls), reasoning=reasoning)


def render(turn: Turn) -> str:
    """The raw text that reads back as `turn`, given words without tags: for people, scripts and tests.

    What a model reads is rendered by its own chat template, never by this.
    """
    parts = [f"{THINK_OPEN}\n{turn.reasoning}\n{THINK_CLOSE}"] if turn.reasoning else []
    parts += [turn.text] if turn.text else []
    for call in turn.calls:
        if isinstance(call, BadCall):
            parts.append(call.raw)
        else:
            payload = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
            parts.append(f"{CALL_OPEN}\n{payload}\n{CALL_CLOSE}")
    return "\n".join(parts)


class _Problem(ValueError):
    """What is wrong with a payload, in words for the model."""


def _read_call(text: str, tag: int, call_id: str) -> tuple[ToolCall | BadCall, int]:
    """The call whose opening tag is at `tag`, and where the text goes on after it."""
    try:
        payload, end = _decode(text, tag + len(CALL_OPEN))
        end = _skip_space(text, end)
        if text.startswith(CALL_CLOSE, end):
            end += len(CALL_CLOSE)
        elif end < len(text) and not text.startswith(CALL_OPEN, end):
            raise _Problem(f"There is more text after the JSON object. Close the call with {CALL_CLOSE}.")
        name, arguments = _name_and_arguments(payload)
    except _Problem as problem:
        close = text.find(CALL_CLOSE, tag)
        end = len(text) if close < 0 else close + len(CALL_CLOSE)
        return BadCall(call_id, text[tag:end], str(problem)), end
    return ToolCall(call_id, name, arguments), end


def _payload_end(text: str, start: int) -> int | None:
    try:
        return _decode(text, start)[1]
    except _Problem:
        return None


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` (after white space) and where it ends."""
    start = _skip_space(text, start)
    if start == len(text) or text.startswith(CALL_CLOSE, start):
        raise _Problem("The call is empty. Write a JSON object with a name and arguments.")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        # Neither the parser's words nor its position: both differ between versions of Python.
        if CALL_CLOSE in text[start:]:
            raise _Problem("The call is not valid JSON. Use double quotes and no trailing commas.") from None
        raise _Problem(f"The call breaks off: no complete JSON object and no {CALL_CLOSE}.") from None
    except RecursionError:
        raise _Problem(f"The call is nested deeper than {MAX_NESTING} levels.") from None
    _refuse_unusable(value)
    return value, end


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


def _name_and_arguments(payload: Any) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(payload, dict):
        raise _Problem(f"A call is one JSON object with a name and arguments, not {_kind(payload)}.")
    unknown = [key for key in payload if key not in ("name", "arguments")]
    if unknown:
        raise _Problem(f"A call has only the keys name and arguments, not {unknown[0][:40]!r}.")
    name = payload.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Problem("The call has no name. Give the tool's name as a string.")
    arguments = payload.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _decode_whole(arguments)
    if not isinstance(arguments, dict):
        raise _Problem(f"The arguments are one JSON object, not {_kind(arguments)}.")
    return name.strip(), arguments


def _decode_whole(text: str) -> Any:
    try:
        value, end = _decode(text, 0)
    except _Problem:
        value, end = None, 0
    if not isinstance(value, dict) or text[end:].strip():
        raise _Problem("The arguments are a string that holds no JSON object. Write the object itself.")
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _refuse_unusable(value: Any) -> None:
    """Refuses nesting that would exhaust a recursive reader, and strings that no encoder takes."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        if any(isinstance(item, str) and _is_half_a_character(item) for item in level):
            raise _Problem("A string holds half of a character (a lone surrogate).")
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += [*item, *item.values()]
            elif isinstance(item, list):
                children += item
        level = children
        if not level:
            return
    raise _Problem(f"The call is nested deeper than {MAX_NESTING} levels.")


def _is_half_a_character(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Problem(f"The key {twice[:40]!r} is given twice.")
    return result


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Problem(f"The number {digits[:20]} is too large.")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MAX_INTEGER:
        raise _Problem(f"The number {digits[:20]} is too large.")
    return int(digits)


def _constant(name: str) -> float:
    raise _Problem(f"{name} is not a JSON number.")


# Line breaks inside strings are accepted (strict=False): models write them, and what is meant is clear.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant, strict=False
)
