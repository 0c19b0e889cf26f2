"""Reads `<function=...>` blocks, the body of a call in the `qwen3_coder` format, in linear time.

A value ends where `</parameter>` is followed by another parameter or by `</function>`. The format has no escapes, and
models leave closing tags out, so a value that holds markup has two readings: the model wrote about markup, or it forgot
to end the value. Such a value is never read:

- On lines of its own, as templates write it, where a line begins with a tag of the format, opening or closing, right or
  misspelt, or ends with one that opens or that closes a parameter, or where a value could end within a line. Other tags
  are data.
- On the line of its opening tag, where a tag of the format stands anywhere in it, but for a `</parameter>` in the
  middle of a line.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import re

from tbx_envs.chat.payload import Unreadable, skip_space

FUNCTION_OPEN, FUNCTION_CLOSE, PARAMETER_CLOSE = "<function=", "</function>", "</parameter>"

# Names are bounded, so that a thousand opening tags without an end are not a thousand searches through the rest.
_FUNCTION_OPEN = re.compile(r"<function=([^>\n]{0,256}+)>")
_PARAMETER_OPEN = re.compile(r"<parameter=([^>\n]{1,256}+)>")
_VALUE_END = re.compile(rf"{PARAMETER_CLOSE}(?=\s*+(?:{_PARAMETER_OPEN.pattern}|{FUNCTION_CLOSE}))")
# The end of a value within a line, behind which a call could really go on or be over.
_ENDS_WITHIN = re.compile(
    rf"{PARAMETER_CLOSE}\s*+(?:{_PARAMETER_OPEN.pattern}|{FUNCTION_CLOSE}\s*+(?:</?tool_call>|\Z))"
)
# Anything that looks like a tag: what its name is near to decides. No part of it can match in two ways.
_TAG = re.compile(r"[<\[][ \t]*+(?P<slash>[/\\]?)[ \t/\\]*+(?P<name>[A-Za-z_]{1,20}+)(?P<rest>[^<>\[\]\n]*+)[>\]]?")
_OURS = ("parameter", "function", "tool_call")
_BEGINNINGS = {"param": "parameter", "parm": "parameter", "func": "function"}
_NEAR = 0.7  # of `difflib`: "paramter", "param" and "toolcall" are near, HTML's names are not


class Unending(Unreadable):
    """A call of which it is unknown where it ends, so that nothing behind it can be read either."""


class FunctionBlocks:
    """The blocks of one text: the ends of values are found once, however many blocks are read.

    Args:
        text: text that the policy wrote.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._ends: list[int] | None = None
        self._line_ends: list[int] = []

    def read(self, start: int) -> tuple[str, dict[str, str], int]:
        """The function's name, its parameters as written, and the end of the block that starts at `start`.

        Raises:
            Unreadable: there is no block, or it has two readings (`Unending`).
        """
        name, written, end, mark = self._read(start)
        if mark is not None:
            raise _unending(*mark)
        return name, written, end

    def outline(self, start: int) -> int:
        """The end of the block at `start`, whatever stands in its values.

        Raises:
            Unreadable: there is no complete block.
        """
        return self._read(start)[2]

    def _read(self, start: int) -> tuple[str, dict[str, str], int, tuple[str, str] | None]:
        """As `read`, and the first (parameter, tag) that makes a value ambiguous."""
        text = self._text
        function = _FUNCTION_OPEN.match(text, start)
        if function is None:
            raise Unreadable(
                f"The call has no function block. Write <function=name>, its parameters and {FUNCTION_CLOSE}."
            )
        name = function[1].strip()
        if not name:
            raise Unreadable("The call has no name. Give the tool's name in <function=name>.")
        written: dict[str, str] = {}
        ambiguous: tuple[str, str] | None = None
        position = skip_space(text, function.end())
        while not text.startswith(FUNCTION_CLOSE, position):
            parameter = _PARAMETER_OPEN.match(text, position)
            if parameter is None:
                if position == len(text):
                    raise Unreadable(f"The call breaks off: no {FUNCTION_CLOSE}.")
                raise Unreadable(f"Between <function={name[:40]}> and {FUNCTION_CLOSE} stand only parameters.")
            key = parameter[1].strip()
            if key in written:
                problem = f"The parameter {key[:40]!r} is given twice."
                raise Unreadable(problem) if ambiguous is None else _unending(*ambiguous)
            written[key], position, tag = self._value(parameter.end(), key)
            if tag is not None and ambiguous is None:
                ambiguous = key, tag
            position = skip_space(text, position)
        return name, written, position + len(FUNCTION_CLOSE), ambiguous

    def _value(self, start: int, key: str) -> tuple[str, int, str | None]:
        """The value behind an opening tag, the position after its closing tag, and a tag that makes it ambiguous."""
        text = self._text
        line_break = next((one for one in ("\n", "\r\n") if text.startswith(one, start)), "")
        within, on_line = self._next_ends(start)
        if not within:
            raise Unending(f"The call breaks off: the parameter {key[:40]!r} does not end.")
        as_template = bool(line_break) and on_line >= 0
        close = on_line if as_template else within[0]
        # The line breaks at the tags are no value's; at the end it is the kind that stands at the beginning.
        last = close - 1 if text.startswith("\n", close - 1) else close
        if line_break == "\r\n" and last < close and text.startswith("\r", last - 1):
            last -= 1
        value = text[min(start + len(line_break), last) : last]
        ends_before = any(_ENDS_WITHIN.match(text, end) for end in within if end < close)
        tag = PARAMETER_CLOSE if ends_before else _tag_in(value, key, anywhere=not as_template)
        return value, close + len(PARAMETER_CLOSE), tag

    def _next_ends(self, start: int) -> tuple[list[int], int]:
        """Where the value from `start` could end: up to the first end on a line of its own, and that one, or -1.

        Without one, only the first end is given: a value on the line of its tags has no other.
        """
        if self._ends is None:
            self._ends = [end.start() for end in _VALUE_END.finditer(self._text)]
            self._line_ends = [end for end in self._ends if self._text[end - 1] == "\n"]
        first = bisect.bisect_left(self._ends, start)
        place = bisect.bisect_left(self._line_ends, start)
        if place == len(self._line_ends):
            return self._ends[first : first + 1], -1
        on_line = self._line_ends[place]
        return self._ends[first : bisect.bisect_right(self._ends, on_line)], on_line


def _unending(key: str, tag: str) -> Unending:
    return Unending(
        f"It is unclear where the parameter {key[:40]!r} ends: {tag[:40]!r} stands in its value. Write each value "
        f"between <parameter=name> and {PARAMETER_CLOSE}, without such tags in it, and end the block with "
        f"{FUNCTION_CLOSE}."
    )


def _tag_in(value: str, key: str, *, anywhere: bool) -> str | None:
    """A tag in a value that may be the end of it, or the beginning of something else; None without one.

    Args:
        anywhere: False where only a tag that begins or ends a line counts.
    """
    for tag in _TAG.finditer(value):
        name, closes = tag["name"].lower(), bool(tag["slash"])
        misspelt = closes or tag["rest"].startswith("=")
        ours = _near(name) if misspelt else name if name in _OURS else None
        if ours is None and closes and tag["name"] == key and not tag["rest"].strip():
            ours = "parameter"  # closed by its own name
        if ours is None:
            continue
        begins, ends = _at_line_edges(value, tag.start(), tag.end())
        # Behind words, the end of a call or block would be followed by lines that begin with tags.
        if begins or (ends and (ours == "parameter" or not closes)) or (anywhere and tag[0] != PARAMETER_CLOSE):
            return tag[0]
    return None


def _at_line_edges(value: str, start: int, end: int) -> tuple[bool, bool]:
    """Whether a line begins at `start`, and whether one ends at `end`, blanks aside."""
    before, behind = start - 1, end
    while before >= 0 and value[before] in " \t":
        before -= 1
    while behind < len(value) and value[behind] in " \t\r":
        behind += 1
    return before < 0 or value[before] == "\n", behind == len(value) or value[behind] == "\n"


@functools.lru_cache(maxsize=1024)
def _near(name: str) -> str | None:
    """The format's name that `name` is, or is a misspelling of."""
    for beginning, ours in _BEGINNINGS.items():
        if name.startswith(beginning):
            return ours
    for ours in _OURS:
        if name.startswith(ours) or difflib.SequenceMatcher(None, name, ours).ratio() >= _NEAR:
            return ours
    return None
