"""Words of users, tools and clients stay words: no token with a meaning of its own is made of them.

A template writes `<|im_end|>` to close a message. Where a tool's result contains the same characters, a tokenizer makes
the same token of them, and the policy reads that the message is over and another one begins, in whichever role the text
says. So such characters in given text are tokenised apart: the text is the same, its tokens are ordinary ones.

Every added token of the tokenizer counts in what users, tools, rules and schemas say. In the assistant's own turns
(history, demonstrations) only special tokens do, which end turns: its words may rightly contain an unreadable call. So
it is in the answer to an unreadable call, which is the environment's and names the tags of the format.

How: a noncharacter of Unicode is put inside each such place before the template renders the text, and the rendered text
is tokenised in pieces that end there. Text without such places is tokenised as ever.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tbx_envs.chat.exact_tokens import exactly_decoded, exactly_encoded
from tbx_envs.errors import ConfigError
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn

_MARK = "\ufdd0"
_MARKS = re.compile(f"{_MARK}+")
_MARK_IN_JSON = json.dumps(_MARK)[1:-1]  # as templates write it that escape to ASCII


class ControlText:
    """Finds control strings in given text, and tokenises text in which they are marked.

    Args:
        tokenizer: transformers tokenizer.

    Raises:
        ConfigError: the tokenizer cannot tokenise text in pieces.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        special, added = set(tokenizer.all_special_ids), tokenizer.added_tokens_decoder
        strings = {str(token): number in special or token.special for number, token in added.items()}
        # Runs of blanks are ordinary words where they are added tokens, and one character cannot be parted.
        strings = {string: ends for string, ends in strings.items() if len(string) > 1 and not string.isspace()}
        # Text that spells the mark as JSON does would be taken for a mark, so it gets one of its own.
        self._any = _starts([*strings, _MARK_IN_JSON])
        self._special = _starts([*(string for string, ends in strings.items() if ends), _MARK_IN_JSON])
        for string in strings:
            text = f"a {string} b"
            ids = self.encode(self.marked(text))
            read = exactly_decoded(tokenizer, ids)
            if read != text or tokenizer.convert_tokens_to_ids(string) in ids:
                raise ConfigError(
                    f"the tokenizer cannot spell {string!r} in ordinary tokens, so a user or a tool that says it would "
                    f"write a control token. Give ChatTemplate(..., splits_control_text=False) to accept that."
                )

    def marked(self, text: str, *, own: bool = False) -> str:
        """`text` with a mark inside every control string.

        Args:
            text: given text.
            own: True for what the assistant said, where only special tokens count.
        """
        found = self._special if own else self._any
        return found.sub(rf"\1{_MARK}", text.replace(_MARK, _MARK * 2))

    def message(self, message: Message) -> Message:
        """A message with marks in all of its text."""
        if isinstance(message, Turn):
            calls = tuple(self._call(call) for call in message.calls)
            text, reasoning = self.marked(message.text, own=True), self.marked(message.reasoning, own=True)
            return dataclasses.replace(message, text=text, reasoning=reasoning, calls=calls)
        text = self.marked(message.text, own=_is_ours(message))
        if isinstance(message, Text):
            return dataclasses.replace(message, text=text)
        return dataclasses.replace(message, text=text, name=self.marked(message.name, own=True))

    def json(self, value: Any, *, own: bool = False) -> Any:
        """A JSON value with marks in all of its texts, keys included."""
        if isinstance(value, str):
            return self.marked(value, own=own)
        if isinstance(value, Mapping):
            return {self.marked(key, own=own): self.json(part, own=own) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(part, own=own) for part in value]
        return value

    def _call(self, call: ToolCall | BadCall) -> ToolCall | BadCall:
        if isinstance(call, BadCall):
            return dataclasses.replace(call, raw=self.marked(call.raw, own=True))
        name, arguments = self.marked(call.name, own=True), self.json(call.arguments, own=True)
        return dataclasses.replace(call, name=name, arguments=arguments)

    def encode(self, rendered: str) -> list[int]:
        """The tokens of rendered text with marks; without one, as the tokenizer has them."""
        pieces, start = [""], 0
        rendered = rendered.replace(_MARK_IN_JSON, _MARK)
        for marks in _MARKS.finditer(rendered):
            literal, ends = divmod(len(marks[0]), 2)
            pieces[-1] += rendered[start : marks.start()] + _MARK * literal
            pieces += [""] * ends
            start = marks.end()
        pieces[-1] += rendered[start:]
        return [number for piece in pieces for number in exactly_encoded(self._tokenizer, piece)]


def _is_ours(message: Text | ToolResult) -> bool:
    """Whether the environment wrote it: what is wrong with a call that could not be read, in terms of the format."""
    return isinstance(message, ToolResult) and message.status == "invalid" and not message.name


def _starts(strings: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each string, wherever one begins, inside another one too."""
    rests: dict[str, list[str]] = {}
    for string in strings:
        rests.setdefault(string[0], []).append(re.escape(string[1:]))
    heads = (f"{re.escape(first)}(?={'|'.join(others)})" for first, others in rests.items())
    return re.compile(f"({'|'.join(heads)})")
