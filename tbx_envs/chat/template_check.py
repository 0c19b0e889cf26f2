"""The start-up check of a chat template: the text appended during an episode must be what the template renders.

Probe conversations with everything that occurs in episodes (reasoning, several calls, several results, rejected calls,
an unreadable call, several user messages) are laid out turn by turn as a ledger would hold them. Before every turn of
the policy, the template's rendering of all messages must be the concatenation of those pieces: everything given,
character by character, and in between the policy's turns, each as it was written or as the template renders it once the
user has answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tbx_envs.chat.detection import PROBE_SCHEMAS, PROBE_TOOLS
from tbx_envs.chat.interpretation import interpret
from tbx_envs.errors import ConfigError
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn

WHAT_TO_DO = (
    "Turns could not be appended to what was sampled. Use a template that leaves earlier messages as they were."
)

_CALLS = (
    ToolCall("call_0", "find", {"name": "Åse </tool_call>", "limit": 3}),
    ToolCall("call_1", "note", {"text": 'say "hi" {now}', "tags": ["a", {"b": None}]}),
    ToolCall("call_2", "close", {}),
)
_UNREADABLE = BadCall("call_3", "close(", "The call breaks off.")
_DIRECT = (ToolResult("call_0", "find", "no parcel"), Text("assistant", "Your parcel is lost."))


class AppendedConversation(Protocol):
    """The part of `tbx_envs.chat.template.ChatTemplate` that the check exercises; its documentation is there."""

    chat_format: str
    generation_prompt: str
    opens_reasoning: bool
    may_reason: bool

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]: ...

    def continuation(self, messages: Sequence[Message]) -> list[int]: ...

    def policy_turn(self, turn: Turn) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def continuation_text(self, messages: Sequence[Message]) -> str: ...

    def turn_text(self, turn: Turn) -> str: ...

    def turn_in_history(self, turn: Turn) -> str: ...

    def adapted(self, messages: Sequence[Message]) -> list[Message]: ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> str: ...

    def encode(self, text: str) -> list[int]: ...


def check_template(chat: AppendedConversation) -> None:
    """Check that episodes can be laid out in tokens piece by piece.

    Raises:
        ConfigError: what the template renders differs from what would be appended.
    """
    with_reasoning = [True] * chat.may_reason + [False] * (not chat.opens_reasoning)
    for reasoning in with_reasoning:
        for tools in (None, PROBE_TOOLS):
            _check_pieces(chat, _probe_conversation(reasoning), tools)
        _check_reading(chat, _probe_conversation(reasoning))
    _check_nothing_is_lost(_DIRECT, chat.continuation_text(_DIRECT))


def _probe_conversation(reasoning: bool) -> tuple[Message, ...]:
    def turn(text: str, *calls: ToolCall | BadCall) -> Turn:
        return Turn(text=text, calls=calls, reasoning="I think so." if reasoning else "")

    return (
        Text("system", "Follow the rules."),
        Text("system", "Today is Monday."),
        Text("user", "Good morning"),
        turn("Who are you?"),
        Text("user", "Åse, née 😀"),
        turn("", *_CALLS[:2]),
        ToolResult("call_0", "find", '[{"id": 1}]'),
        ToolResult("call_1", "note", "ok"),
        turn("Closing.", _CALLS[2]),
        ToolResult("call_2", "close", "refused: closed already", "rejected"),
        turn("", _UNREADABLE),
        ToolResult("call_3", "", "The call breaks off.", "invalid"),
        turn("It is closed already. Anything else?"),
        Text("user", "No"),
        turn("Bye. <DONE>"),
    )


def _check_pieces(
    chat: AppendedConversation, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> None:
    conversation = chat.adapted(conversation)
    pieces: list[tuple[str, ...]] = []  # in order; for each, the texts that the template may render there
    ids: list[int] = []
    text = ""
    start = 0
    for place, message in enumerate(conversation):
        if not isinstance(message, Turn):
            continue
        new = conversation[start:place]
        given = chat.continuation_text(new) if ids else chat.render(new, tools, generation_prompt=True)
        ids += chat.continuation(new) if ids else chat.opening(new, tools)
        text += given
        pieces.append((given.removesuffix(chat.generation_prompt),))
        whole = chat.render(conversation[:place], tools, generation_prompt=True)
        _require_in_a_row([*pieces, (chat.generation_prompt,)], whole, place)
        if chat.encode(text) != ids:
            raise ConfigError(
                f"the tokenizer encodes {text[-40:]!r} differently after the text before it. {WHAT_TO_DO}"
            )
        written = chat.turn_text(message)
        text += written
        ids += chat.encode(written)
        pieces.append((chat.generation_prompt + written, chat.turn_in_history(message)))
        start = place + 1
    _check_nothing_is_lost(conversation, chat.render(conversation, tools))


def _require_in_a_row(pieces: Sequence[tuple[str, ...]], whole: str, num_messages: int) -> None:
    position = 0
    for allowed in pieces:
        found = next((text for text in allowed if whole.startswith(text, position)), None)
        if found is None:
            raise ConfigError(
                f"the chat template changes earlier messages: with {num_messages} messages, it renders "
                f"{whole[position : position + 40]!r} where {allowed[0][:40]!r} was appended. {WHAT_TO_DO}"
            )
        position += len(found)
    if position < len(whole):
        raise ConfigError(
            f"the chat template changes earlier messages: with {num_messages} messages, it adds "
            f"{whole[position : position + 40]!r} at the end. {WHAT_TO_DO}"
        )


def _check_nothing_is_lost(messages: Sequence[Message], rendered: str) -> None:
    """System texts may be left out: a policy can be specialised on one domain."""
    words: list[str] = []
    for message in messages:
        if isinstance(message, Turn):
            words += [message.text, *(call.name for call in message.calls if isinstance(call, ToolCall))]
        elif getattr(message, "role", "") != "system":
            words.append(message.text)
    lost = [text for text in words if text not in rendered and _escaped(text) not in rendered]
    if lost:
        raise ConfigError(
            f"the chat template leaves out {', '.join(map(repr, lost))}, so the policy would never read it. "
            f"Use a template that renders users, tool calls and tool results."
        )


def _escaped(text: str) -> str:
    """The text as written by a template that renders results as JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _check_reading(chat: AppendedConversation, conversation: Sequence[Message]) -> None:
    """Turns as the template writes them must parse back to the same turns."""
    for message in chat.adapted(conversation):
        if not isinstance(message, Turn) or _UNREADABLE in message.calls:
            continue
        raw = chat.decode(chat.policy_turn(message))
        read = interpret(raw, chat.chat_format, schemas=PROBE_SCHEMAS)
        if (read.text, _calls_of(read), read.num_lenient) != (message.text, _calls_of(message), 0):
            raise ConfigError(
                f"the chat template writes a turn as {raw!r}, which the format '{chat.chat_format}' reads as "
                f"{read}. Choose the chat_format that the template writes, or register one."
            )


def _calls_of(turn: Turn) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) if isinstance(call, ToolCall) else ("", call.raw) for call in turn.calls]
