"""Evidence: the JSON that a dataset task's test receives; together with the task's test code all that a grade needs.

It has the form of the original's `TestContext`, so that this repository's check worker and the original build the same
argument `x` for the same episode.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from tbx_envs.messages import DONE_MARK, BadCall, Message, Text, ToolCall, ToolResult, Transcript, Turn


def evidence_of(
    transcript: Transcript,
    *,
    effects: Mapping[str, Any],
    init_result: Mapping[str, Any],
    session_id: str,
    metadata: Mapping[str, Any],
    opening: int | None = None,
    ends_turn: Collection[str] = (),
) -> dict[str, Any]:
    """The evidence of an episode: new objects that are unchanged by a round trip through JSON.

    Args:
        transcript: messages of the episode.
        effects: server -> end state that it reports; a server that cannot report one must have raised before.
        init_result: server -> answer of its init.
        session_id: id of the episode's session.
        metadata: content of the test's `x.metadata`.
        opening: number of messages before the agent's first turn, the last of which is the first question. Messages
            before that question are a history, whose calls do not belong to this episode. None: there is no history.
        ends_turn: tools that are not executed; a call of one is recorded with an empty response, without a message.
    """
    history = 0 if opening is None else max(0, opening - 1)
    ending = {call.id for message in transcript[history:] for call in _calls(message) if _ends(call, ends_turn)}
    messages: list[dict[str, Any]] = []
    asked = False
    for index, message in enumerate(transcript):
        is_new = index >= history
        if is_new and isinstance(message, ToolResult) and message.call_id in ending:
            continue
        messages += _records(message, is_simulated=asked, ending=ending if is_new else frozenset())
        asked |= is_new and isinstance(message, Text) and message.role == "user"
    said = [message for message in messages if message["T"] == "Text" and message["role"] == "assistant"]
    tags = {tag: [text["content"] for text in said if text["metadata"]["tag"] == tag] for tag in ("text", "direct")}
    evidence = {
        "response": tags["text"][-1] if tags["text"] else "",
        "tool_direct_responses": tags["direct"],
        "effects": effects,
        "tool_calls": _answered_calls(transcript[history:], ending),
        "messages": messages,
        "init_result": init_result,
        "session_id": session_id,
        "metadata": metadata,
    }
    return json.loads(json.dumps(evidence, default=dict))


def _records(message: Message, *, is_simulated: bool, ending: AbstractSet[str]) -> list[dict[str, Any]]:
    """A message as messages of the original; a turn becomes up to three: reasoning, text, calls."""
    match message:
        case Text("assistant", text):
            return [_said(text, "direct")]
        case Text(role, text):
            metadata = {"is_user_llm": True} if is_simulated and role == "user" else {}
            return [{"T": "Text", "metadata": metadata, "role": role, "content": text}]
        case ToolResult():
            return [_response(message)]
    records = [_said(message.reasoning, "think")] if message.reasoning else []
    records += [_said(message.text, "text")] if message.text else []
    if message.calls:
        calls = [_call(call, ending) for call in message.calls]
        ends = any(call.id in ending for call in message.calls)
        metadata = {"is_end_turn_tool": True} if ends else {}
        records.append({"T": "ParallelToolCall", "metadata": metadata, "tool_calls": calls})
    return records


def _said(text: str, tag: str) -> dict[str, Any]:
    is_done = tag == "text" and text.strip().endswith(DONE_MARK)
    metadata = {"tag": tag, "is_done": True} if is_done else {"tag": tag}
    return {"T": "Text", "metadata": metadata, "role": "assistant", "content": text}


def _call(call: ToolCall | BadCall, ending: AbstractSet[str]) -> dict[str, Any]:
    """A call; an unreadable one has no name and no arguments, and its metadata says why."""
    if isinstance(call, BadCall):
        metadata = {"error": call.problem, "raw": call.raw}
        return {"T": "ToolCall", "metadata": metadata, "name": "", "arguments": {}, "id": call.id}
    ends = {"is_end_turn_tool": True} if call.id in ending else {}
    return {"T": "ToolCall", "metadata": ends, "name": call.name, "arguments": call.arguments, "id": call.id}


def _response(result: ToolResult) -> dict[str, Any]:
    return {"T": "ToolResponse", "metadata": {}, "name": result.name, "content": result.text, "id": result.call_id}


def _answered_calls(messages: Transcript, ending: AbstractSet[str]) -> list[dict[str, Any]]:
    """Calls with their answers, in the order of the answers; a call that ends the conversation has an empty answer.

    Calls that were not executed because the episode ended before are left out.
    """
    calls = {call.id: call for message in messages for call in _calls(message)}
    answered = [message for message in messages if isinstance(message, ToolResult) and message.call_id in calls]
    without = ending & calls.keys() - {result.call_id for result in answered}
    unexecuted = [call for call in calls.values() if isinstance(call, ToolCall) and call.id in without]
    answered += [ToolResult(call.id, call.name, "") for call in unexecuted]
    return [
        {"tool_call": _call(calls[result.call_id], ending), "tool_response": _response(result)} for result in answered
    ]


def _calls(message: Message) -> tuple[ToolCall | BadCall, ...]:
    return message.calls if isinstance(message, Turn) and not message.truncated else ()


def _ends(call: ToolCall | BadCall, ends_turn: Collection[str]) -> bool:
    return isinstance(call, ToolCall) and call.name in ends_turn
