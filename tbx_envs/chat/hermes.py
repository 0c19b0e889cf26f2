"""The `hermes` format: `<tool_call>{"name": "find_patient", "arguments": {"name": "Ada"}}</tool_call>`.

Several calls in a turn are executed in order; words around them are kept as text. How strictly it is read:

- A call is one JSON object, read from the opening tag on: braces and closing tags inside strings are data.
- `arguments` may be missing or null (no arguments), and may be a string that holds a JSON object.
- A complete object whose closing tag is missing is accepted at the end of the turn and before another call.
- A call that is only nearly in the format is read if it has one reading (`tbx_envs.chat.turn_reader`), and counted.
- Everything else is a `BadCall`: broken JSON, an object that `tbx_envs.chat.payload` does not accept, more text between
  the object and the closing tag.
- An unreadable call extends to the closing tag that matches, or to the end where that is unknown; a call quoted inside
  it is not executed.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.chat.parts import CALL_CLOSE, CALL_OPEN
from tbx_envs.chat.reasoning import THINK_CLOSE, THINK_OPEN, split_reasoning
from tbx_envs.chat.turn_reader import CALL_START, TurnReader
from tbx_envs.messages import BadCall, Turn


def parse(raw: str, ids: Iterator[str], schemas: Mapping[str, Mapping[str, Any]]) -> Turn:
    """The turn in `raw`; `ids` supplies the ids of the calls.

    Args:
        schemas: tool -> JSON schema of its arguments. JSON has types: it tells which tools are known.

    Raises:
        TooManyCalls: there are more calls than a turn may have (`tbx_envs.chat.interpretation` answers that).
    """
    reasoning, visible, joints = split_reasoning(raw, CALL_START, TurnReader(raw, schemas, "object").outline)
    return TurnReader(visible, schemas, "object", joints).read().turn(ids, reasoning)


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
