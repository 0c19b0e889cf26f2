"""What other parties wrote as text for people: a transcript, and words that a terminal only shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tbx_envs.messages import BadCall, Message, Text, ToolResult, Turn

# What a terminal obeys: controls of C0 and C1 but tabs and line feeds, and what turns the direction of writing over.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with each character that a terminal would obey in place of showing it as its escape, `\\x1b`."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def visible_line(text: str) -> str:
    """The same in one line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def transcript_text(messages: Iterable[Message]) -> str:
    """One paragraph for each message: who said, called or answered what."""
    return visible("\n".join(line for message in messages for line in _lines(message)))


def _lines(message: Message) -> list[str]:
    match message:
        case Text(role, text):
            return [f"{role}: {text}"]
        case ToolResult(_, name, text, status):
            mark = "" if status == "ok" else f" [{status}]"
            return [f"  <- {name or '(unreadable call)'}{mark}: {text}"]
        case Turn():
            return _turn_lines(message)


def _turn_lines(turn: Turn) -> list[str]:
    lines = [f"agent (thinking): {turn.reasoning}"] if turn.reasoning else []
    if turn.text or not turn.calls:
        lines.append(f"agent: {turn.text}")
    for call in turn.calls:
        if isinstance(call, BadCall):
            lines.append(f"  -> unreadable call: {call.raw}")
        else:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=repr)
            lines.append(f"  -> {call.name} {arguments}")
    return [*lines, "  (cut off by a token limit)"] if turn.truncated else lines
