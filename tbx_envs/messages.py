"""The messages of an episode: frozen records, in the order they were said.

A transcript is a tuple of three kinds: `Text` (of the system or the user), `Turn` (everything the agent wrote at once)
and `ToolResult`. A `Turn` is also the parsed form of an action: interpreting the agent's raw text yields one
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
    """Text that the agent did not write in this episode.

    Attributes:
        role: `system`, `user`, or `assistant`: the direct response of a tool, which goes to the user without the
            agent's doing, and what an agent said in a task's history.
        text: the words.
    """

    role: Literal["system", "user", "assistant"]
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that could be parsed.

    Attributes:
        id: id that is unique within the episode, given by the environment (`"call_0"`, `"call_1"`, ...).
        name: tool name, not checked here.
        arguments: JSON object as the agent wrote it, before validation. Treated as immutable.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class BadCall:
    """A call that could not be parsed; answered with an error message for the model.

    Attributes:
        id: as in `ToolCall`.
        raw: text in place of the call.
        problem: description of the error, in words for the model.
    """

    id: str
    raw: str
    problem: str


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Everything the agent wrote at once.

    A turn with calls is answered by their results, and the agent continues; one without calls is a message to the user.

    Attributes:
        text: visible words, without reasoning and calls, stripped.
        calls: calls in the order written.
        reasoning: content of `<think>`; never executed and never shown to the user.
        truncated: True when the turn was cut off by a token limit; its calls are not executed and the episode ends.
        num_lenient: number of calls that were read although they are only nearly in the format. It is counted in
            `Episode.usage`, is no part of what was said, and is not saved with it.
    """

    text: str = ""
    calls: tuple[ToolCall | BadCall, ...] = ()
    reasoning: str = ""
    truncated: bool = False
    num_lenient: int = dataclasses.field(default=0, compare=False)

    @property
    def is_done(self) -> bool:
        """True when the agent ended the conversation: a message that ends with `<DONE>` and makes no call."""
        return not self.calls and self.text.rstrip().endswith(DONE_MARK)


@dataclasses.dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call.

    Attributes:
        call_id: id of the `ToolCall` or `BadCall` answered.
        name: tool name; "" for a call that could not be parsed.
        text: text the model reads.
        status: `ok`; `rejected` (the tool said no); `invalid` (unparsable call, unknown tool, wrong arguments).
    """

    call_id: str
    name: str
    text: str
    status: Literal["ok", "rejected", "invalid"] = "ok"


Message = Text | Turn | ToolResult
Transcript = tuple[Message, ...]


def to_chat(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages as chat-template and OpenAI style dictionaries, new objects each time.

    A call that could not be parsed has no place in that form; its text is appended to the content as written.
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
