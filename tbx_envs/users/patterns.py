"""Finds patterns in an agent's words in linear time, with the result of `re.search`.

`fee.*agree` takes quadratic time on a line of many fees and no `agree`: each `fee` is tried, and each looks through the
rest of the line. Here one pass finds where `agree` can start; a `fee` without one behind it on its line is not tried.

This holds for each alternative with one `.*` outside of parentheses, however it is written. Every other pattern is
searched as it is, so an author keeps repetition bounded (`.{0,20}`) or to one kind of character.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator


def first_match(pattern: str, text: str) -> int | None:
    """Where the first match of `pattern` (case ignored) in `text` starts; None without one."""
    starts = [start for search in _searches(pattern) if (start := search.first_in(text)) is not None]
    return min(starts, default=None)


class _Search:
    """One alternative of a pattern.

    Args:
        pattern: regular expression.
        head: what stands before its `.*`; None for one that is searched as it is.
        tail: what stands behind it.
    """

    def __init__(self, pattern: str, head: str | None = None, tail: str = "") -> None:
        self._whole = re.compile(pattern, re.IGNORECASE)
        self._head = None if head is None else re.compile(f"(?=({head}))", re.IGNORECASE)
        self._tail = re.compile(f"(?={tail})", re.IGNORECASE)

    def first_in(self, text: str) -> int | None:
        if self._head is None:
            found = self._whole.search(text)
            return found.start() if found else None
        # A head without a tail between it and the end of its line would look through the whole line for nothing.
        tails = [found.start() for found in self._tail.finditer(text)]
        line_end = -1
        for head in self._head.finditer(text) if tails else ():
            if head.end(1) > line_end:  # looked for once a line, not once a head
                line_end = text.find("\n", head.end(1))
                line_end = len(text) if line_end < 0 else line_end
                last = bisect.bisect_right(tails, line_end)
            if last and tails[last - 1] >= head.start() and self._whole.match(text, head.start()):
                return head.start()
        return None


@functools.lru_cache(maxsize=1024)
def _searches(pattern: str) -> tuple[_Search, ...]:
    """The searches whose earliest result is the pattern's."""
    if pattern.startswith("(?") or re.search(r"\\[1-9]|\(\?[P(]", pattern):  # flags and groups concern all of it
        return (_Search(pattern),)
    searches = []
    for alternative in _split(pattern, "|"):
        head, *tails = _split(alternative, ".*")
        if len(tails) == 1 and head and tails[0] and tails[0][0] not in "?+":
            searches.append(_Search(alternative, head, tails[0]))
        else:
            searches.append(_Search(alternative))
    return tuple(searches)


def _split(pattern: str, separator: str) -> Iterator[str]:
    """Parts of a regular expression between separators that stand outside of parentheses and character classes."""
    start = position = depth = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 2
        elif character == "[":
            position = pattern.index("]", position + 2) + 1
        elif depth == 0 and pattern.startswith(separator, position):
            yield pattern[start:position]
            start = position = position + len(separator)
        else:
            depth += (character == "(") - (character == ")")
            position += 1
    yield pattern[start:]
