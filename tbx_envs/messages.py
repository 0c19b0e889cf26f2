"""What is said in an episode: frozen records, in the order they were said.

A transcript is a tuple of three kinds: `Text` (system or user), `Turn` (everything the policy wrote in one go)
and `ToolResult`. A `Turn` is also the parsed form of an action: interpreting the policy's raw text yields one
(`tbx_envs.chat`), and `ToolEnv.step` accepts one directly.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

DONE_MARK = "<DONE>"


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Words that the policy did not write: of the system, of the user, or said in the agent's name.

    Attributes:
        role: `assistant` for the direct response of a tool, which the user is told without the policy's doing, and
            for what an agent said in a history.
    """

    role: Literal["system", "user", "assistant"]
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that could be read.

    Attributes:
        id: unique within the episode, given by the environment (`"call_0"`, `"call_1"`, ...).
        name: of the tool; not checked here.
        arguments: a JSON object as the policy wrote it, before validation. Treated as immutable.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class BadCall:
    """A call that could not be read; answered with an error that the model can use.

    Attributes:
        id: as in `ToolCall`.
        raw: what stood where a call should have been.
        problem: what is wrong with it, in words for the model.
    """

    id: str
    raw: str
    problem: str


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Everything the policy wrote in one go.

    A turn with calls is answered by their results and goes on; one without calls is a message to the user.

    Attributes:
        text: the visible words, reasoning and calls taken out, stripped.
        calls: in the order written.
        reasoning: what stood in `<think>`; never executed and never shown to the user.
        truncated: the turn was cut off by a token limit; its calls are not executed and the episode ends.
    """

    text: str = ""
    calls: tuple[ToolCall | BadCall, ...] = ()
    reasoning: str = ""
    truncated: bool = False

    @property
    def is_done(self) -> bool:
        """True when the policy ended the conversation: a message that ends with `<DONE>` and calls nothing."""
        return not self.calls and self.text.rstrip().endswith(DONE_MARK)


@dataclasses.dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call.

    Attributes:
        call_id: of the `ToolCall` or `BadCall` answered.
        name: of the tool, or "" for a call that could not be read.
        text: what the model reads.
        status: `ok`; `rejected` (the tool said no); `invalid` (unreadable call, unknown tool, wrong arguments).
    """

    call_id: str
    name: str
    text: str
    status: Literal["ok", "rejected", "invalid"] = "ok"


Message = Text | Turn | ToolResult
Transcript = tuple[Message, ...]


def to_chat(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages as chat-template and OpenAI style dictionaries, new objects each time.

    A call that could not be read has no place in that form and is put back into the content as written.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        match message:
            case Text(role, text):
                chat.append({"role": role, "content": text})
            case ToolResult(call_id, name, text):
                chat.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})
            case Turn():
                chat.append(_assistant_to_chat(message))
    return chat


def _assistant_to_chat(turn: Turn) -> dict[str, Any]:
    unreadable = [call.raw for call in turn.calls if isinstance(call, BadCall)]
    entry: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(filter(None, [turn.text, *unreadable])),
    }
    if turn.reasoning:
        entry["reasoning_content"] = turn.reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(json.dumps(call.arguments))},
        }
        for call in turn.calls
        if isinstance(call, ToolCall)
    ]
    if calls:
        entry["tool_calls"] = calls
    return entry
