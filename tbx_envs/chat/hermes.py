"""The `hermes` format: `<tool_call>{"name": "find_patient", "arguments": {"name": "Ada"}}</tool_call>`.

Several calls in a turn are executed in order; words around them are kept as text. How strictly it is read:

- A call is one JSON object, read from the opening tag on: braces and closing tags inside strings are data.
- `arguments` may be missing or null (no arguments), and may be a string that holds a JSON object.
- A complete object whose closing tag is missing is accepted at the end of the turn and before another call.
- Everything else is a `BadCall`: broken JSON, an object that `tbx_envs.chat.payload` does not accept, more text between
  the object and the closing tag.
- An unreadable call extends to the next closing tag or to the end; a call quoted inside it is not executed.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.chat.payload import Unreadable, decode, name_and_arguments, skip_space
from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN, split_reasoning
from tbx_envs.messages import BadCall, ToolCall, Turn

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


def parse(raw: str, ids: Iterator[str], schemas: Mapping[str, Mapping[str, Any]]) -> Turn:
    """The turn in `raw`; `ids` supplies the ids of the calls. Never raises, whatever the text.

    JSON has types, so `schemas` is ignored.
    """
    reasoning, visible = split_reasoning(raw, re.escape(CALL_OPEN), _payload_end)
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
    """Raw text that parses back to `turn`, provided that its words contain no tags: for people, scripts and tests.

    What a model reads is rendered by its own chat template, never by this function.
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


def _read_call(text: str, tag: int, call_id: str) -> tuple[ToolCall | BadCall, int]:
    """The call whose opening tag is at `tag`, and the position after it."""
    try:
        payload, end = _decode(text, tag + len(CALL_OPEN))
        end = skip_space(text, end)
        if text.startswith(CALL_CLOSE, end):
            end += len(CALL_CLOSE)
        elif end < len(text) and not text.startswith(CALL_OPEN, end):
            raise Unreadable(f"There is more text after the JSON object. Close the call with {CALL_CLOSE}.")
        name, arguments = name_and_arguments(payload)
    except Unreadable as problem:
        close = text.find(CALL_CLOSE, tag)
        end = len(text) if close < 0 else close + len(CALL_CLOSE)
        return BadCall(call_id, text[tag:end], str(problem)), end
    return ToolCall(call_id, name, arguments), end


def _payload_end(text: str, tag: int) -> int | None:
    try:
        return _decode(text, tag + len(CALL_OPEN))[1]
    except Unreadable:
        return None


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` (after white space) and where it ends."""
    start = skip_space(text, start)
    if start == len(text) or text.startswith(CALL_CLOSE, start):
        raise Unreadable("The call is empty. Write a JSON object with a name and arguments.")
    try:
        return decode(text, start)
    except json.JSONDecodeError:
        if text.find(CALL_CLOSE, start) >= 0:
            raise Unreadable("The call is not valid JSON. Use double quotes and no trailing commas.") from None
        raise Unreadable(f"The call breaks off: no complete JSON object and no {CALL_CLOSE}.") from None
