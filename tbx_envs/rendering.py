"""A transcript as text for people."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tbx_envs.messages import BadCall, Message, Text, ToolResult, Turn


def transcript_text(messages: Iterable[Message]) -> str:
    """One paragraph for each message: who said, called or answered what."""
    return "\n".join(line for message in messages for line in _lines(message))


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
