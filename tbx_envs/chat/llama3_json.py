"""The `llama3_json` format: the whole message is `{"name": "find_patient", "parameters": {"name": "Ada"}}`.

No tag marks the beginning of a call, so text counts as a call only when it cannot be anything else. How strictly it is
read:

- A message consists of calls when it begins, after its reasoning, with a JSON object whose first key is one of a call's
  (`name`, `parameters`, `arguments`, or `"type": "function"`); or when it contains `<|python_tag|>`: what follows that
  token is calls, what precedes it is words. In any other message, calls that are only nearly in the format are read if
  they have one reading (`tbx_envs.chat.turn_reader`), and counted; the rest is words.
- Several calls follow each other, with `;`, line breaks or `<|python_tag|>` between them.
- The key of the arguments is `parameters` or `arguments`; they may be missing, null, or a string that holds the object.
- Everything else is a `BadCall`: broken JSON, an object that `tbx_envs.chat.payload` does not accept, words after a
  call. Unreadable JSON extends to the end of the message; a call quoted inside it is not executed.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tbx_envs.chat.parts import CALL_CLOSE, PYTHON_TAG, Parts
from tbx_envs.chat.payload import Unreadable, call_in, decode, name_and_arguments
from tbx_envs.chat.reasoning import split_reasoning
from tbx_envs.chat.turn_reader import CALL_START, REASONING_WITHIN, TurnReader, has_joint
from tbx_envs.messages import Turn

_CALL = r'\{\s*"(?:(?:name|parameters|arguments)"|type"\s*:\s*"function")'
_BETWEEN = re.compile(rf"(?:[\s;]|{re.escape(PYTHON_TAG)})*+")
_CLOSING_TAG = re.compile(rf"\s*+{CALL_CLOSE}")
_GOES_ON = re.compile(rf"\s*+(?:[;{{]|{re.escape(PYTHON_TAG)}|\Z)")


def parse(raw: str, ids: Iterator[str], schemas: Mapping[str, Mapping[str, Any]]) -> Turn:
    """The turn in `raw`; `ids` supplies the ids of the calls.

    Args:
        schemas: tool -> JSON schema of its arguments. JSON has types: it tells which tools are known.

    Raises:
        TooManyCalls: there are more calls than a turn may have (`tbx_envs.chat.interpretation` answers that).
    """
    reasoning, visible, joints = split_reasoning(raw, CALL_START, TurnReader(raw, schemas, None).outline)
    visible = visible.strip()  # where there are joints it has no space at its ends
    words, tag, payload = ("", "", visible) if re.match(_CALL, visible) else visible.partition(PYTHON_TAG)
    if not tag and not re.match(_CALL, payload):
        return TurnReader(visible, schemas, None, joints).read().turn(ids, reasoning)
    parts = Parts()
    parts.say(words)
    within = [joint - (len(visible) - len(payload)) for joint in joints]
    position = _after_separators(payload, 0)
    while position < len(payload):
        position = _after_separators(payload, _read_call(payload, position, parts, within))
    if not parts.num_calls:
        parts.bad(tag, "The call is empty. Write a JSON object with a name and parameters.")
    return parts.turn(ids, reasoning)


def _read_call(text: str, start: int, parts: Parts, joints: Sequence[int]) -> int:
    """Read the call that starts at `start`; returns the position after it."""
    end = len(text)
    try:
        payload, after = _decode(text, start)
        reasoning_within = has_joint(joints, start, after)
        closing = _CLOSING_TAG.match(text, after)
        after = closing.end() if closing else after
        if not _GOES_ON.match(text, after):
            raise Unreadable("There is more text after the JSON object. Write calls only, with ; between them.")
        end = after
        if reasoning_within:
            raise Unreadable(REASONING_WITHIN)
        several = isinstance(payload, list) and payload and all(isinstance(member, dict) for member in payload)
        found = [_call(member) for member in payload] if several else [_call(payload)]
    except Unreadable as problem:
        parts.bad(text[start:end], str(problem))
        return end
    for name, arguments, respelt in found:
        parts.call(name, arguments, lenient=bool(respelt or several or closing))
    return end


def _call(payload: Any) -> tuple[str, Mapping[str, Any], bool]:
    """The call of a JSON value, and whether it is only nearly in the format."""
    if isinstance(payload, dict) and "function" not in payload:
        # Models of this family add it sometimes; it carries no information.
        payload = {key: value for key, value in payload.items() if (key, value) != ("type", "function")}
        if "arguments" in payload and "parameters" not in payload:
            return *name_and_arguments(payload), False
    return call_in(payload, "parameters")


def _decode(text: str, start: int) -> tuple[Any, int]:
    try:
        return decode(text, start)
    except json.JSONDecodeError:
        raise Unreadable(
            "The call is not a complete JSON object. Use double quotes, no trailing commas, and close every brace."
        ) from None


def _after_separators(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return match.end() if match else position
