"""Reads the calls in a text from left to right: those in the format, and those that are only nearly in it.

Nearly right are calls that models write often and that have exactly one reading:

- a call between `<tool_call>` tags in the other format's body, with `parameters` for `arguments`, or in a fence;
- a `<function=...>` block, an object or a list of objects without the opening tag, or without both.

A call without an opening tag is read where a call stands: it begins a line, and nothing but calls follows it, or its
closing tag. An object without any tag must name a known tool, as other JSON is words. In the middle of a sentence, or
with words behind it, a call of a known tool may be meant or quoted: it is not made, and the model is told so.

Each search goes on where the last one ended. What can be tried anew, an unreadable call, is bounded by
`tbx_envs.chat.parts.MAX_CALLS`.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tbx_envs.chat.function_block import FUNCTION_OPEN, FunctionBlocks, Unending
from tbx_envs.chat.parts import CALL_CLOSE, CALL_OPEN, MAX_CALLS, PYTHON_TAG, Parts, Tags, TooManyCalls
from tbx_envs.chat.payload import Unreadable, call_in, decode, skip_space
from tbx_envs.chat.typed_values import typed_arguments

# Body of a call between tags in the reader's own format; None for a format without tags.
Body = Literal["object", "block"] | None
Call = tuple[str, Mapping[str, Any]]

_FENCE_OPEN = re.compile(r"```[\w-]*+[ \t\r]*+\n\s*+")
_FENCE_CLOSE = re.compile(r"\s*+```")
_KEY = "(?:id|name|arguments|parameters|type|function)"
_KEYS = rf"""["']{_KEY}["']\s*+:"""
_OBJECT = re.compile(rf"(?:\[\s*+)?{{\s*+{_KEYS}")
# What may be the beginning of a call, for `tbx_envs.chat.reasoning.split_reasoning`; `TurnReader.outline` decides.
# An object in single quotes is never complete, so it is none.
CALL_START = rf'{re.escape(CALL_OPEN)}|{FUNCTION_OPEN}|(?:\[\s*+)?{{\s*+"{_KEY}"\s*+:'
_BEFORE_A_CALL = ";}>[`"  # a separator, another call, a tag, a list, a fence
_START = re.compile(
    rf"(?P<tag>{re.escape(CALL_OPEN)}|{re.escape(PYTHON_TAG)})"
    rf"|(?P<line>(?m:^)[ \t]*+(?:{_FENCE_OPEN.pattern})?(?={FUNCTION_OPEN}|{_OBJECT.pattern}))"
    rf"|(?P<within>{FUNCTION_OPEN}|{{(?=\s*+{_KEYS}))"
)
_NAMED = re.compile(r"""["']name["']\s*+:\s*+["']([^"'\n]{1,200}+)["']|<function=([^>\n]{1,200}+)>""")
_SEPARATORS = re.compile(r"[;\s]*+")
_SEARCHED = 300  # characters of an unreadable object in which its name is looked for
_STRAY = re.compile(
    rf"(?m:^)[ \t]*+(?:{re.escape(CALL_OPEN)}|{CALL_CLOSE}|</function>|</?parameter\b|{re.escape(PYTHON_TAG)})"
)

_AMONG_WORDS = "A call stands among words, so it was not made. Write the call alone, in the format you were given."
_WORDS_BEHIND = "There is more text after the call, so it was not made. Write calls last, in the format you were given."
_NOT_JSON = "The call is not valid JSON. Use double quotes and no trailing commas."
REASONING_WITHIN = "There is reasoning inside of the call, so it was not made. Think before the call, not in it."
_STRAY_TAG = "There is a tag of a call, but no complete call. Write the call in the format you were given."


class TurnReader:
    """The calls in one text.

    Args:
        text: text without its reasoning.
        schemas: tool -> JSON schema of its arguments; its keys are the known tools.
        own: body of a call between tags in the format.
        joints: places in the text where reasoning was taken out (`tbx_envs.chat.reasoning.Split`).
    """

    def __init__(
        self, text: str, schemas: Mapping[str, Mapping[str, Any]], own: Body, joints: Sequence[int] = ()
    ) -> None:
        self._text = text
        self._schemas = schemas
        self._own = own
        self._joints = joints
        self._blocks = FunctionBlocks(text)
        self._num_failed = 0

    def read(self) -> Parts:
        """All words and calls.

        Raises:
            TooManyCalls: there are more calls than a turn may have.
        """
        text, parts = self._text, Parts()
        said = position = 0  # words begin at `said`; the search goes on at `position`
        words_begin = self._skip_separators(0)
        while start := _START.search(text, position):
            begin = start.start()
            if start[0] == CALL_OPEN:
                end = self._between_tags(begin, parts, said)
            elif start[0] == PYTHON_TAG:
                end = self._without_tags(skip_space(text, start.end()), begin, parts, said, alone=True)
            else:
                body = start.end() if start["line"] is not None else begin
                alone = start["line"] is not None or begin <= words_begin
                end = self._without_tags(body, begin, parts, said, alone=alone)
            if end is None:
                position = max(start.end(), begin + 1)
            else:
                said = position = end
                words_begin = self._skip_separators(end)
        parts.say(text[said:])
        if not parts.num_calls:
            self._find_stray(parts)
        return parts

    def outline(self, raw: str, start: int) -> int | None:
        """The end of the body of the complete call that starts at `start`, whatever stands in its values; or None.

        A call without an opening tag is none in the middle of a sentence, where it is not made either.

        Raises:
            TooManyCalls: more calls than a turn may have were incomplete.
        """
        text = self._text
        tagged = text.startswith(CALL_OPEN, start)
        if not (tagged or self._may_begin(start)):
            return None
        body = skip_space(text, start + len(CALL_OPEN)) if tagged else start
        try:
            if text.startswith(FUNCTION_OPEN, body):
                return self._blocks.outline(body)
            if text.startswith(("{", "["), body):
                return decode(text, body)[1]
            return None
        except ValueError:
            self._num_failed += 1
            if self._num_failed > MAX_CALLS:
                raise TooManyCalls from None
            return None

    def _may_begin(self, start: int) -> bool:
        """Whether what stands at `start` begins a line or follows what may stand before a call."""
        before = start - 1
        while before >= 0 and self._text[before].isspace():
            before -= 1
        return before < 0 or self._text[before] in _BEFORE_A_CALL or "\n" in self._text[before + 1 : start]

    def _skip_separators(self, position: int) -> int:
        match = _SEPARATORS.match(self._text, position)
        return match.end() if match else position

    @functools.cached_property
    def _tags(self) -> Tags:
        return Tags(self._text)

    # --- between tags -----------------------------------------------------------------------------------------

    def _between_tags(self, tag: int, parts: Parts, said: int) -> int | None:
        """Read the call whose opening tag is at `tag`; returns where it ends, or None when it is words."""
        text = self._text
        if self._own is None and self._num_failed > MAX_CALLS:
            return None
        try:
            found, end, lenient = self._body(tag + len(CALL_OPEN))
            if has_joint(self._joints, skip_space(text, tag + len(CALL_OPEN)), end):
                raise Unreadable(REASONING_WITHIN)
            end = self._closed(end)
        except Unreadable as problem:
            self._num_failed += 1
            if self._own is None and text[text.rfind("\n", 0, tag) + 1 : tag].strip():
                return None  # quoted in a sentence, in a format without tags
            end = len(text) if isinstance(problem, Unending) else self._tags.end_of_unreadable(tag)
            parts.say(text[said:tag])
            parts.bad(text[tag:end], str(problem))
            return end
        parts.say(text[said:tag])
        parts.call(*found, lenient=lenient or self._own is None)
        return end

    def _closed(self, end: int) -> int:
        """The position behind the closing tag of a call whose body ends at `end`."""
        text, end = self._text, skip_space(self._text, end)
        if text.startswith(CALL_CLOSE, end):
            return end + len(CALL_CLOSE)
        if end < len(text) and not text.startswith(CALL_OPEN, end):
            what = "</function>" if self._own == "block" else "the JSON object"
            raise Unreadable(f"There is more text after {what}. Close the call with {CALL_CLOSE}.")
        return end

    def _body(self, start: int) -> tuple[Call, int, bool]:
        """The call of a body, where it ends, and whether it is only nearly in the format."""
        text = self._text
        start = skip_space(text, start)
        fence = _FENCE_OPEN.match(text, start)
        begin = fence.end() if fence else start
        is_block = text.startswith(FUNCTION_OPEN, begin)
        if is_block or text.startswith("{", begin):
            try:
                found, end, respelt = self._block(begin) if is_block else self._object(begin, fenced=fence is not None)
            except Unending:
                raise
            except Unreadable:
                if not fence and is_block == (self._own == "block"):
                    raise
            else:
                if fence and (closing := _FENCE_CLOSE.match(text, end)):
                    end = closing.end()
                return found, end, respelt or fence is not None or is_block != (self._own == "block")
        if self._own == "block":
            return self._block(start)
        return self._object(start)

    def _block(self, start: int) -> tuple[Call, int, bool]:
        name, written, end = self._blocks.read(start)
        return (name, typed_arguments(written, self._schemas.get(name, {}))), end, False

    def _object(self, start: int, *, fenced: bool = False) -> tuple[Call, int, bool]:
        text = self._text
        if start == len(text) or text.startswith(CALL_CLOSE, start):
            raise Unreadable("The call is empty. Write a JSON object with a name and arguments.")
        try:
            payload, end = decode(text, start)
        except json.JSONDecodeError:
            if text.find(CALL_CLOSE, start) >= 0:
                raise Unreadable(_NOT_JSON) from None
            raise Unreadable(f"The call breaks off: no complete JSON object and no {CALL_CLOSE}.") from None
        if not fenced:
            self._closed(end)  # what stands behind it is told before what is wrong with it
        name, arguments, respelt = call_in(payload, "arguments")
        return (name, arguments), end, respelt

    # --- without tags -----------------------------------------------------------------------------------------

    def _without_tags(self, body: int, start: int, parts: Parts, said: int, *, alone: bool) -> int | None:
        """Read what may be a call at `body`; returns where it ends, or None when it is words.

        Args:
            start: where it begins, with its fence or tag.
            alone: True when it begins a line or follows a call.
        """
        text = self._text
        if self._num_failed > MAX_CALLS:
            return None
        try:
            calls, end = self._bare(body)
        except Unreadable as problem:
            self._num_failed += 1
            named = _NAMED.search(text, body, body + _SEARCHED) if alone else None
            if named is None or (named[1] or named[2]).strip() not in self._schemas:
                return None
            parts.say(text[said:start])
            end = len(text) if isinstance(problem, Unending) else self._tags.end_of_unreadable(start, opened=False)
            parts.bad(text[start:end], str(problem))
            return end
        if not calls:
            return None
        known = all(name in self._schemas for name, _ in calls)
        end, closed, words_behind = self._behind(end)
        is_ours = self._own == "block" and text.startswith(FUNCTION_OPEN, body)
        if not (known or ((closed or is_ours) and alone)):
            return None
        parts.say(text[said:start])
        reason = REASONING_WITHIN if has_joint(self._joints, body, end) else None
        reason = _AMONG_WORDS if not alone else _WORDS_BEHIND if words_behind else reason
        if reason:
            parts.bad(text[start:end], reason)
            return end
        for call in calls:
            parts.call(*call, lenient=True)
        return end

    def _bare(self, start: int) -> tuple[list[Call], int]:
        """The calls of a block, an object or a list, and where it ends; no call for JSON that is something else.

        Raises:
            Unreadable: there is no complete one.
        """
        if self._text.startswith(FUNCTION_OPEN, start):
            found, end, _ = self._block(start)
            return [found], end
        if not _OBJECT.match(self._text, start):
            return [], start
        try:
            payload, end = decode(self._text, start)
        except json.JSONDecodeError:
            raise Unreadable(_NOT_JSON) from None
        members = payload if isinstance(payload, list) else [payload]
        if not any(_named(member) in self._schemas or self._closes(end) for member in members):
            return [], end
        return [call_in(member, "arguments")[:2] for member in members], end

    def _closes(self, end: int) -> bool:
        return self._text.startswith(CALL_CLOSE, skip_space(self._text, end))

    def _behind(self, end: int) -> tuple[int, bool, bool]:
        """The end of a call with what closes it, whether its closing tag does, and whether words follow."""
        text = self._text
        if fence := _FENCE_CLOSE.match(text, end):
            end = fence.end()
        place = skip_space(text, end)
        closed = text.startswith(CALL_CLOSE, place)
        if closed:
            end = place + len(CALL_CLOSE)
            if fence := _FENCE_CLOSE.match(text, end):
                end = fence.end()
            return end, True, False
        goes_on = (";", CALL_OPEN, PYTHON_TAG, FUNCTION_OPEN, "{", "[", "```")
        return end, False, place < len(text) and not text.startswith(goes_on, place)

    def _find_stray(self, parts: Parts) -> None:
        """Tags on lines of their own in a text without any call were meant as a call."""
        if stray := _STRAY.search(self._text):
            parts.words = [self._text[: stray.start()]]
            parts.bad(self._text[stray.start() :].strip(), _STRAY_TAG)


def has_joint(joints: Sequence[int], start: int, end: int) -> bool:
    """Whether reasoning was taken out between two places, so that what stands there is not what was written."""
    return bisect.bisect_left(joints, start) < bisect.bisect_left(joints, end)


def _named(member: Any) -> str | None:
    """The tool that a JSON value names; None where it is no object with a name and arguments."""
    if not isinstance(member, dict):
        return None
    if member.get("type") == "function" and isinstance(member.get("function"), dict):
        member = member["function"]
    name = member.get("name")
    return name.strip() if isinstance(name, str) and len(member) > 1 else None
