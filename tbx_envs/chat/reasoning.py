"""Splits reasoning off a turn before anything in it is read as a call: a call drafted in reasoning is never executed.

Rules, in the order of the text:
- `<think>` opens reasoning and the next `</think>` closes it; when it is not closed, all the rest is reasoning.
- A `</think>` without an opening tag makes everything before it reasoning: either the prompt opened it, or the policy
  nested its reasoning.
- Tags inside a complete call outside of reasoning are data.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """A turn without and apart from its reasoning.

    Attributes:
        reasoning: all reasoning, its tags removed.
        visible: all else. Pieces on either side of reasoning are joined with a line break, so that two halves of a tag
            cannot form one.
        joints: where in `visible` those line breaks stand.
    """

    reasoning: str
    visible: str
    joints: tuple[int, ...] = ()


def split_reasoning(raw: str, call_start: str, call_end: Callable[[str, int], int | None]) -> Split:
    """A turn, split.

    Args:
        raw: text that the policy wrote.
        call_start: regular expression, without groups, that matches the start of a call.
        call_end: `(text, start) -> end` of the complete call that starts there, or None.
    """
    if THINK_OPEN not in raw and THINK_CLOSE not in raw:
        return Split("", raw)
    marks = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}|(?P<call>{call_start})")
    before: list[str] = []  # all that a closing tag without an opening one has made reasoning
    reasoning: list[str] = []
    visible: list[str] = []
    start = position = 0
    while mark := marks.search(raw, position):
        if mark["call"]:
            position = call_end(raw, mark.start()) or mark.end()
            continue
        visible.append(raw[start : mark.start()])
        start = mark.end()
        if mark[0] == THINK_CLOSE:
            before += [*reasoning, *visible]
            reasoning, visible = [], []
        else:
            close = raw.find(THINK_CLOSE, start)
            reasoning.append(raw[start:] if close < 0 else raw[start:close])
            start = len(raw) if close < 0 else close + len(THINK_CLOSE)
        position = start
    visible.append(raw[start:])
    pieces = _stripped(visible)
    ends = itertools.accumulate(len(piece) + 1 for piece in pieces[:-1])
    return Split(
        "\n".join(_stripped(["\n".join(before), *reasoning])), "\n".join(pieces), tuple(end - 1 for end in ends)
    )


def _stripped(pieces: list[str]) -> list[str]:
    return [stripped for piece in pieces if (stripped := piece.strip())]
