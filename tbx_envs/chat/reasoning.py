"""Reasoning is taken out of a turn before anything in it is read as a call.

Rules, in the order of the text:
- `<think>` opens reasoning and the next `</think>` closes it; unclosed, all the rest is reasoning.
- A `</think>` that nothing opened makes everything before it reasoning: either the prompt had opened it, or
  the policy nested its reasoning. Whatever stood there was a draft, and a draft is never executed.
- Tags inside the JSON of a call that stands outside reasoning are data and count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def split_reasoning(raw: str, call_open: str, payload_end: Callable[[str, int], int | None]) -> tuple[str, str]:
    """`(reasoning, visible)`, the tags removed.

    Args:
        raw: what the policy wrote.
        call_open: the tag in front of a call's payload.
        payload_end: `(text, start) -> end` of the complete payload that starts there, or None.

    Returns:
        Pieces on either side of reasoning are joined with a line break, so that no tag can grow together from
        two halves.
    """
    if THINK_OPEN not in raw and THINK_CLOSE not in raw:
        return "", raw
    marks = re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, call_open))))
    reasoning: list[str] = []
    visible: list[str] = []
    start = position = 0
    while mark := marks.search(raw, position):
        if mark[0] == call_open:
            position = payload_end(raw, mark.end()) or mark.end()
            continue
        visible.append(raw[start : mark.start()])
        start = mark.end()
        if mark[0] == THINK_CLOSE:
            reasoning, visible = ["\n".join([*reasoning, *visible])], []
        else:
            close = raw.find(THINK_CLOSE, start)
            reasoning.append(raw[start:] if close < 0 else raw[start:close])
            start = len(raw) if close < 0 else close + len(THINK_CLOSE)
        position = start
    visible.append(raw[start:])
    return _joined(reasoning), _joined(visible)


def _joined(pieces: list[str]) -> str:
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))
