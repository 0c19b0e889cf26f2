"""Splits reasoning off a turn before anything in it is read as a call: a call drafted in reasoning is never executed.

Rules, in the order of the text:
- `<think>` opens reasoning and the next `</think>` closes it; when it is not closed, all the rest is reasoning.
- A `</think>` without an opening tag makes everything before it reasoning: either the prompt opened it, or the policy
  nested its reasoning.
- Tags inside a complete call outside of reasoning are data.
"""

from __future__ import annotations

import re
from collections.abc import Callable

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def split_reasoning(raw: str, call_start: str, call_end: Callable[[str, int], int | None]) -> tuple[str, str]:
    """`(reasoning, visible)`, the tags removed.

    Args:
        raw: text that the policy wrote.
        call_start: regular expression, without groups, that matches the start of a call.
        call_end: `(text, start) -> end` of the complete call that starts there, or None.

    Returns:
        Pieces on either side of reasoning are joined with a line break, so that two halves of a tag cannot form one.
    """
    if THINK_OPEN not in raw and THINK_CLOSE not in raw:
        return "", raw
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
    return _joined(["\n".join(before), *reasoning]), _joined(visible)


def _joined(pieces: list[str]) -> str:
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))
