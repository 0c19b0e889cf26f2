"""The messages before a task's query: converts messages of a `.meta.yaml` file to our form.

Consecutive messages of the agent become one `Turn`: its reasoning, then its text, then its calls, until a result or a
message of another role follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.errors import did_you_mean
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.thinkingbox.dataset.file_records import (
    AnyRawMessage,
    HistoryReference,
    MetaFields,
    RawMessage,
    RawParallelToolCall,
    RawText,
    RawToolCall,
    RawToolResponse,
    validated,
)
from tbx_envs.thinkingbox.dataset.problems import ProblemCollector, problem
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_mapping, read_text


def meta_file_of(test_file: Path) -> Path:
    """The file of a test file's messages."""
    return test_file.with_suffix("").with_suffix(".meta.yaml")


def load_history(meta_file: Path, reference: HistoryReference, asked_at: tuple[Path, int]) -> tuple[Message, ...]:
    """The messages that a test's `history` names.

    Args:
        meta_file: file of the messages.
        reference: the test's `history`.
        asked_at: file and line of the reference, for error messages.

    Raises:
        DatasetProblems: there is no such file, group or message, or messages are invalid.
    """
    asked = f"history '{reference.key}:{reference.start}:{reference.end}'"
    if not meta_file.is_file():
        raise problem(*asked_at, f"{asked} needs the file {meta_file.name} beside the test file; there is none")
    source = YamlText(meta_file, read_text(meta_file))
    groups = validated(MetaFields, load_mapping(source, "a .meta.yaml file"), source).history
    group = groups.get(reference.key)
    if group is None:
        near = did_you_mean(reference.key, groups)
        raise problem(
            *asked_at, f"{asked}: no group '{reference.key}' in {meta_file.name}.{near} It has {_listed(groups)}."
        )
    try:
        first, after = _bounds(group, reference)
    except ValueError as error:
        raise problem(*asked_at, f"{asked}: {error}") from error
    return messages_of(group[first:after], source, ("$history", reference.key), first)


def messages_of(
    raw: Sequence[Any], source: YamlText, keys: tuple[str | int, ...] = (), first: int = 0
) -> tuple[Message, ...]:
    """Our form of messages as the format writes them (`T: Text`, ...).

    Args:
        raw: messages in the form of the file.
        source: text that they were read from.
        keys: keys that lead to their list in the source.
        first: number of the first message in that list.

    Raises:
        DatasetProblems: messages are invalid; has all of them, with their lines.
    """
    collector = ProblemCollector()
    read: list[AnyRawMessage | None] = [
        collector.attempt(_message, item, source, (*keys, first + n)) for n, item in enumerate(raw)
    ]
    collector.finish()
    builder = _HistoryBuilder()
    for message in read:
        if message is not None:  # true of all of them after `finish`
            builder.add(message)
    builder.end_turn()
    return tuple(builder.messages)


def _message(item: Any, source: YamlText, keys: tuple[str | int, ...]) -> AnyRawMessage:
    return validated(RawMessage, item, source, keys).root


def _bounds(group: Sequence[dict[str, Any]], reference: HistoryReference) -> tuple[int, int]:
    """Numbers of the first message and of the first message that is left out.

    Raises:
        ValueError: there is no such message, or the end is not after the start.
    """
    ids = [message.get("message_id") for message in group]

    def number_of(message_id: str) -> int:
        if message_id not in ids:
            known = ", ".join(str(name) for name in ids if name is not None) or "none"
            raise ValueError(f"no message has the message_id '{message_id}'; there are: {known}")
        return ids.index(message_id)

    first = reference.start if isinstance(reference.start, int) else number_of(reference.start)
    if not 0 <= first <= len(group):
        raise ValueError(f"it begins at {first}, the group has {len(group)} messages, counted from 0")
    if reference.end == "":
        return first, len(group)
    after = number_of(reference.end)
    if after <= first:
        raise ValueError(f"it ends before message {after} and begins at message {first}; begin earlier")
    return first, after


class _HistoryBuilder:
    """Collects messages; the agent's text and calls are buffered until its turn ends."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._words = ""
        self._calls: list[ToolCall | BadCall] = []
        self._unanswered: list[ToolCall | BadCall] = []
        self._num_named = 0

    def add(self, message: AnyRawMessage) -> None:
        match message:
            case RawText(metadata={"is_dummy": True}):  # a placeholder for a turn without text
                return
            case RawText(role="assistant"):
                self._say(message)
            case RawText():
                self.end_turn()
                self.messages.append(Text(message.role, message.content))
            case RawToolCall():
                self._call(message)
            case RawParallelToolCall():
                for call in message.tool_calls:
                    self._call(call)
            case RawToolResponse():
                self.end_turn()
                self._answer(message)

    def end_turn(self) -> None:
        if self._thoughts or self._words or self._calls:
            self.messages.append(Turn(self._words, tuple(self._calls), "\n".join(self._thoughts)))
        self._thoughts, self._words, self._calls = [], "", []

    def _say(self, message: RawText) -> None:
        match message.metadata.get("tag", "text"):
            case "think":
                if self._words or self._calls:
                    self.end_turn()
                self._thoughts.append(message.content)
            case "direct":  # a tool's direct response
                self.end_turn()
                self.messages.append(Text("assistant", message.content))
            case _:
                if self._words or self._calls:
                    self.end_turn()
                self._words = message.content.strip()

    def _call(self, call: RawToolCall) -> None:
        call_id = call.id or self._new_id()
        error = call.metadata.get("error")
        made = (
            BadCall(call_id, json.dumps({"name": call.name, "arguments": call.arguments}), str(error))
            if error
            else ToolCall(call_id, call.name, call.arguments)
        )
        self._calls.append(made)
        self._unanswered.append(made)

    def _answer(self, result: RawToolResponse) -> None:
        """Add a result; one without an id belongs to the earliest call without a result."""
        waiting = [call for call in self._unanswered if result.id in (None, call.id)]
        call = waiting[0] if waiting else None
        if call is not None:
            self._unanswered.remove(call)
        call_id = result.id or (call.id if call else self._new_id())
        unreadable = isinstance(call, BadCall)
        self.messages.append(
            ToolResult(call_id, "" if unreadable else result.name, result.content, "invalid" if unreadable else "ok")
        )

    def _new_id(self) -> str:
        self._num_named += 1
        return f"call_of_history_{self._num_named}"


def _listed(groups: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in groups) or "no group"
