"""A turn as it is handed to an environment: checked, its texts cleaned, its calls numbered.

Words are cleaned. A call whose arguments no tool could get (no JSON, half of a surrogate pair) becomes a `BadCall`,
which is answered with an error and executed nowhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from tbx_envs.doors import clean_text, shown, text_problem
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.tools.arguments import transport_problem

_OUR_ID = re.compile(r"call_([0-9]{1,9})")
_RAW_CHARS = 2000


def action_problem(action: Any) -> str | None:
    """Why something is no action of an agent, as the rest of a sentence that starts with "the action is", or None."""
    if isinstance(action, str):
        return text_problem(action)
    if not isinstance(action, Turn):
        return f"a {type(action).__name__}; give text or a Turn"
    for name in ("text", "reasoning"):
        if problem := text_problem(getattr(action, name)):
            return f"a Turn whose {name} is {problem}"
    calls = action.calls
    if not isinstance(calls, tuple | list) or not all(isinstance(call, ToolCall | BadCall) for call in calls):
        return f"a Turn whose calls are {shown(calls)}; give a tuple of ToolCall and BadCall"
    return None


def numbered(turn: Turn, first: int) -> Turn:
    """The turn with clean texts, and with ids of ours for its calls (`call_<first>` and so on)."""
    calls = tuple(_entered_call(call, f"call_{number}") for number, call in enumerate(turn.calls, start=first))
    return dataclasses.replace(
        turn,
        text=clean_text(turn.text),
        calls=calls,
        reasoning=clean_text(turn.reasoning),
        truncated=bool(turn.truncated),
    )


def _entered_call(call: ToolCall | BadCall, call_id: str) -> ToolCall | BadCall:
    if isinstance(call, BadCall):
        return BadCall(call_id, _as_text(call.raw), _as_text(call.problem))
    if isinstance(call.name, str) and clean_text(call.name) == call.name and _is_carried(call.arguments):
        return ToolCall(call_id, call.name, call.arguments)
    problem = transport_problem(call.name, call.arguments) or f"{_as_text(call.name)} was not called."
    raw = f"{_as_text(call.name)}({shown(call.arguments, _RAW_CHARS)})"
    return BadCall(call_id, raw, problem)


def _as_text(value: Any) -> str:
    return clean_text(value) if isinstance(value, str) else shown(value)


def _is_carried(arguments: Any) -> bool:
    if not isinstance(arguments, Mapping):
        return False
    try:
        written = json.dumps(dict(arguments), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return clean_text(written) == written


# --- what others said ---------------------------------------------------------------------------------------


def entered(messages: Iterable[Message]) -> list[Message]:
    """Messages that others wrote, with clean texts and each call's id once.

    A call whose id an earlier call has gets another one, and so does its result: histories are recorded from servers
    that number their calls anew in each answer.
    """
    taken: set[str] = set()
    renamed: dict[str, str] = {}
    return [_entered(message, taken, renamed) for message in messages]


def _entered(message: Message, taken: set[str], renamed: dict[str, str]) -> Message:
    match message:
        case Text(role, text):
            return Text(role, clean_text(text))
        case ToolResult(call_id, name, text, status):
            return ToolResult(renamed.get(call_id, call_id), clean_text(name), clean_text(text), status)
    calls = []
    for call in message.calls:
        renamed[call.id] = new = free_id(call.id, taken)
        taken.add(new)
        calls.append(_entered_call(call, new))
    return Turn(clean_text(message.text), tuple(calls), clean_text(message.reasoning), message.truncated)


def free_id(wanted: str, taken: Container[str]) -> str:
    """The id, or where it is taken the same with the first number behind it that is not."""
    return next(name for name in _with_numbers(wanted) if name not in taken)


def _with_numbers(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def next_call_number(messages: Iterable[Message]) -> int:
    """The number from which on ids of ours are free: beyond all that the messages have, given by any party."""
    calls = [call for message in messages if isinstance(message, Turn) for call in message.calls]
    taken = [int(found[1]) + 1 for call in calls if (found := _OUR_ID.fullmatch(call.id))]
    return max([len(calls), *taken])
