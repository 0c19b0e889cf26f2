"""The `qwen3_coder` format:

    <tool_call>
    <function=find_patient>
    <parameter=name>
    Ada
    </parameter>
    </function>
    </tool_call>

Values carry no types: `tbx_envs.chat.typed_values` gives them the types of the tool's schema. Several calls in a turn
are executed in order; words around them are kept as text. How strictly it is read:

- A value is on lines of its own, as templates write it, and ends at the first `</parameter>` at the start of a line
  that is followed by `<parameter=...>` or `</function>`: any other tag in it is data. A value written on the line of
  its opening tag ends at the first `</parameter>` that is followed by one of these. The format has no escapes, so a
  value cannot contain its own end.
- A complete block whose `</tool_call>` is missing is accepted at the end of the turn and before another call.
- A function block outside `<tool_call>` is words.
- Everything else is a `BadCall`: no function block, no name, a value that does not end, other text between parameters
  or after the block, the same parameter twice (it is unknown which one is meant).
- An unreadable call extends to the next closing tag or to the end; a call quoted inside it is not executed.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.chat.payload import Unreadable, skip_space
from tbx_envs.chat.reasoning import split_reasoning
from tbx_envs.chat.typed_values import typed_arguments
from tbx_envs.messages import BadCall, ToolCall, Turn

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_CLOSE, PARAMETER_CLOSE = "</function>", "</parameter>"

_FUNCTION_OPEN = re.compile(r"<function=([^>\n]*)>")
_PARAMETER_OPEN = re.compile(r"<parameter=([^>\n]+)>")
_GOES_ON = re.compile(rf"\s*(?:{_PARAMETER_OPEN.pattern}|{FUNCTION_CLOSE})")


def parse(raw: str, ids: Iterator[str], schemas: Mapping[str, Mapping[str, Any]]) -> Turn:
    """The turn in `raw`; `ids` supplies the ids of the calls. Never raises, whatever the text.

    Args:
        schemas: tool -> JSON schema of its arguments; values of other tools stay text.
    """
    reasoning, visible = split_reasoning(raw, re.escape(CALL_OPEN), _block_end)
    words: list[str] = []
    calls: list[ToolCall | BadCall] = []
    position = 0
    while (tag := visible.find(CALL_OPEN, position)) >= 0:
        words.append(visible[position:tag])
        call, position = _read_call(visible, tag, next(ids), schemas)
        calls.append(call)
    words.append(visible[position:])
    text = "\n".join(stripped for piece in words if (stripped := piece.strip()))
    return Turn(text=text, calls=tuple(calls), reasoning=reasoning)


def _read_call(
    text: str, tag: int, call_id: str, schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[ToolCall | BadCall, int]:
    """The call whose opening tag is at `tag`, and the position after it."""
    try:
        name, written, end = _read_block(text, tag + len(CALL_OPEN))
        end = skip_space(text, end)
        if text.startswith(CALL_CLOSE, end):
            end += len(CALL_CLOSE)
        elif end < len(text) and not text.startswith(CALL_OPEN, end):
            raise Unreadable(f"There is more text after {FUNCTION_CLOSE}. Close the call with {CALL_CLOSE}.")
    except Unreadable as problem:
        close = text.find(CALL_CLOSE, tag)
        end = len(text) if close < 0 else close + len(CALL_CLOSE)
        return BadCall(call_id, text[tag:end], str(problem)), end
    return ToolCall(call_id, name, typed_arguments(written, schemas.get(name, {}))), end


def _block_end(text: str, tag: int) -> int | None:
    try:
        return _read_block(text, tag + len(CALL_OPEN))[2]
    except Unreadable:
        return None


def _read_block(text: str, start: int) -> tuple[str, dict[str, str], int]:
    """The function's name, its parameters as written, and the end of the block."""
    function = _FUNCTION_OPEN.match(text, skip_space(text, start))
    if function is None:
        raise Unreadable(f"The call has no function block. Write <function=name>, its parameters and {FUNCTION_CLOSE}.")
    name = function[1].strip()
    if not name:
        raise Unreadable("The call has no name. Give the tool's name in <function=name>.")
    written: dict[str, str] = {}
    position = skip_space(text, function.end())
    while not text.startswith(FUNCTION_CLOSE, position):
        parameter = _PARAMETER_OPEN.match(text, position)
        if parameter is None:
            if position == len(text):
                raise Unreadable(f"The call breaks off: no {FUNCTION_CLOSE}.")
            raise Unreadable(f"Between <function={name[:40]}> and {FUNCTION_CLOSE} stand only parameters.")
        key = parameter[1].strip()
        if key in written:
            raise Unreadable(f"The parameter {key[:40]!r} is given twice.")
        written[key], position = _read_value(text, parameter.end(), key)
        position = skip_space(text, position)
    return name, written, position + len(FUNCTION_CLOSE)


def _read_value(text: str, start: int, key: str) -> tuple[str, int]:
    """The value that starts right after its opening tag, and the position after its closing tag."""
    on_lines = text.startswith("\n", start)
    close = _find_close(text, start, own_line=True) if on_lines else -1
    close = close if close >= 0 else _find_close(text, start, own_line=False)
    if close < 0:
        raise Unreadable(f"The call breaks off: the parameter {key[:40]!r} does not end.")
    last = close - 1 if text.startswith("\n", close - 1) else close  # the line break before the tag is not the value's
    return text[min(start + on_lines, last) : last], close + len(PARAMETER_CLOSE)


def _find_close(text: str, start: int, own_line: bool) -> int:
    """Position of the first closing tag that another parameter or the block's end follows; -1 when there is none."""
    close = text.find(PARAMETER_CLOSE, start)
    while close >= 0:
        if (text[close - 1] == "\n" or not own_line) and _GOES_ON.match(text, close + len(PARAMETER_CLOSE)):
            return close
        close = text.find(PARAMETER_CLOSE, close + 1)
    return -1
