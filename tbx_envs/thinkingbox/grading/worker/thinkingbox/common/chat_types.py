"""An episode as a test sees it: `TestContext` and its messages.

The fields are those of the original, so that each can read the other's evidence.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal

from pydantic import BaseModel, Field

_NO_SESSION = "00000000-0000-0000-0000-000000000000"


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


class Message(BaseModel):
    """Base of all messages."""

    T: Literal["Message"] = "Message"
    metadata: dict[str, Any] = Field(default_factory=dict)


class Text(Message):
    """Text. The agent's has `metadata["tag"]`: `think` (hidden), `text`, or `direct` (a tool's direct response)."""

    T: Literal["Text"] = "Text"
    role: Literal["system", "user", "assistant"]
    content: str

    @property
    def tag(self) -> str:
        return self.metadata.get("tag", "text")

    @property
    def is_visible(self) -> bool:
        return self.tag != "think"


class ToolCall(Message):
    """A call of a tool; `metadata["error"]` says why an unreadable call could not be read."""

    T: Literal["ToolCall"] = "ToolCall"
    name: str
    arguments: dict
    id: str = Field(default_factory=_new_call_id)


class ParallelToolCall(Message):
    """The calls of one turn."""

    T: Literal["ParallelToolCall"] = "ParallelToolCall"
    tool_calls: list[ToolCall]


class ToolResponse(Message):
    """The answer to the call of the same id."""

    T: Literal["ToolResponse"] = "ToolResponse"
    name: str
    content: str
    id: str = Field(default_factory=_new_call_id)


MessageT = Text | ToolCall | ParallelToolCall | ToolResponse


class Conversation(BaseModel):
    messages: list[MessageT] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=lambda: {"usage": []})


class ToolCallResponse(BaseModel):
    """A call and its answer; the answer is empty for a call that ended the conversation."""

    tool_call: ToolCall
    tool_response: ToolResponse


class ToolDef(BaseModel):
    name: str
    description: str
    input_schema: dict
    direct_response: str | None = None
    is_end_turn: bool = False


class TestContext(BaseModel):
    """The argument `x` of a test.

    `response` is the agent's last visible message; `effects` is the end state that each server reports; `metadata` is
    for tests and fixtures to write to.
    """

    __test__ = False  # not a test class of pytest

    response: str = ""
    tool_direct_responses: list[str] = Field(default_factory=list)
    effects: dict[str, Any] = Field(default_factory=dict)
    tool_calls: list[ToolCallResponse] = Field(default_factory=list)
    messages: list[MessageT] = Field(default_factory=list)
    init_result: dict[str, Any] = Field(default_factory=dict)
    session_id: str = _NO_SESSION
    metadata: dict[str, Any] = Field(default_factory=dict)

    def transcript(self, limit: int = 0) -> str:
        """The visible conversation; with a limit, from the agent's `limit`-th last message on."""
        return get_conversation_transcript(self.messages, limit=limit)

    def query(self) -> str:
        """The user's first message."""
        for message in self.messages:
            if isinstance(message, Text) and message.role == "user" and _is_said(message):
                return message.content
        raise ValueError("the episode has no message of the user")


def get_conversation_transcript(
    messages: Iterable[Message],
    limit: int = 0,
    content_transform_fn: Callable[[str], str] | None = None,
) -> str:
    """The visible messages as `User: ...` and `Assistant: ...`, separated by empty lines.

    Args:
        messages: messages of the episode.
        limit: 0 for all; else the end of the conversation, from the agent's `limit`-th last message on.
        content_transform_fn: function applied to the text of each message.
    """
    if limit < 0:
        raise ValueError("limit must be >= 0")
    said = [m for m in messages if isinstance(m, Text) and m.role in ("user", "assistant") and _is_said(m)]
    if limit:
        of_agent = [index for index, message in enumerate(said) if message.role == "assistant"]
        said = said[of_agent[-limit] if len(of_agent) >= limit else 0 :]
    labels = {"user": "User", "assistant": "Assistant"}
    change = content_transform_fn or str
    return "\n\n".join(f"{labels[message.role]}: {change(message.content)}" for message in said)


def _is_said(message: Text) -> bool:
    return message.is_visible and not message.metadata.get("is_dummy", False)
