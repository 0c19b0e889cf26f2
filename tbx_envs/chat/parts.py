"""What a reader finds in a text, in order: words, calls, and what was meant as a call and is none.

Every reader collects its findings here, so that two rules hold for all of them: calls are numbered in the order of the
text, and reading ends soon after `MAX_CALLS` of them.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.messages import BadCall, ToolCall, Turn

# Calls that a turn may have. The longest turn of a person's work is a handful; a text of thousands is degenerate.
MAX_CALLS = 64
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_TAGS = re.compile(f"{CALL_OPEN}|{CALL_CLOSE}")


class TooManyCalls(Exception):
    """A text begins more calls than a turn may have, so none of them is made."""


class Parts:
    """Words and calls of one text."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.num_lenient = 0
        self._calls: list[tuple[str, Mapping[str, Any]] | tuple[str, str, None]] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def say(self, words: str) -> None:
        self.words.append(words)

    def call(self, name: str, arguments: Mapping[str, Any], *, lenient: bool = False) -> None:
        """Add a call; `lenient` for one that is only nearly in the format."""
        self._calls.append((name, arguments))
        self.num_lenient += lenient
        self._count()

    def bad(self, raw: str, problem: str) -> None:
        self._calls.append((raw, problem, None))
        self._count()

    def _count(self) -> None:
        if len(self._calls) > MAX_CALLS:
            raise TooManyCalls

    def turn(self, ids: Iterator[str], reasoning: str) -> Turn:
        calls: list[ToolCall | BadCall] = []
        for found in self._calls:
            calls.append(ToolCall(next(ids), *found) if len(found) == 2 else BadCall(next(ids), found[0], found[1]))
        text = "\n".join(stripped for piece in self.words if (stripped := piece.strip()))
        return Turn(text=text, calls=tuple(calls), reasoning=reasoning, num_lenient=self.num_lenient)


class Tags:
    """The `<tool_call>` tags of a text, counted once, to find where an unreadable call ends.

    What may be quoted inside such a call is not executed. So it ends at the closing tag that matches; and where none
    matches, or more tags are closed behind it than opened, its end is unknown and it takes the rest of the text.
    """

    def __init__(self, text: str) -> None:
        self._length = len(text)
        found = list(_TAGS.finditer(text))
        self._starts = [tag.start() for tag in found]
        self._ends = [tag.end() for tag in found]
        self._depths = list(itertools.accumulate(1 if tag[0] == CALL_OPEN else -1 for tag in found))
        lowest = list(itertools.accumulate(reversed(self._depths), min))
        self._lowest_behind = lowest[::-1]

    def end_of_unreadable(self, start: int, *, opened: bool = True) -> int:
        """Where the unreadable call ends that starts at `start`, with an opening tag or (not `opened`) without one."""
        place = bisect.bisect_left(self._starts, start)
        outside = (self._depths[place - 1] if place else 0) - (not opened)
        if place == len(self._depths) or self._lowest_behind[place] < outside:
            return self._length
        for behind in range(place, len(self._depths)):
            if self._depths[behind] == outside:
                return self._ends[behind]
        return self._length
