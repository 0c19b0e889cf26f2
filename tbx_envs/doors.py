"""What other parties hand us, at the places where it enters: text, JSON, sizes, and exceptions put in words.

docs/architecture.md lists the doors. Each of them calls a function of this module once, so that nothing deeper has to
ask whether a text can be encoded, whether a value has a form, or whether an exception can be printed.

Half of a surrogate pair is no character: no tokenizer, file or socket takes it. Words are cleaned (it becomes U+FFFD,
as in every decoder). Arguments of a call are not, since a tool must not get a value that no one wrote: such a call is
answered as invalid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_TEXT_CHARS = 4 * 2**20  # of one message: a million tokens and more, beyond the context of any model
MAX_JSON_DEPTH = 64  # nesting of a request; recursive readers behind the door (templates, json) stand more

_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_SHOWN = 200  # characters of a value that a message repeats
_WORDS = 2000  # characters of an exception's own words that a message repeats


class TooLarge(ValueError):
    """Something is larger, or nested deeper, than what is let in. The message says which limit it breaks."""


# --- text and JSON ------------------------------------------------------------------------------------------


def clean_text(text: str) -> str:
    """The text with each half of a surrogate pair replaced by U+FFFD; two halves in a row become their character."""
    if text.isascii() or not _HALF_A_PAIR.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_json(value: Any) -> Any:
    """The JSON value with all its texts cleaned, keys included; itself where nothing has to be.

    Raises:
        TooLarge: it is nested so deeply that it cannot be walked through.
    """
    try:
        return _cleaned(value)
    except RecursionError:
        raise TooLarge("it is nested too deeply") from None


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return clean_text(value)
        case dict():
            return {_cleaned(key): _cleaned(item) for key, item in value.items()}
        case list() | tuple():
            return [_cleaned(item) for item in value]
    return value


def read_json(data: bytes | str, *, max_depth: int | None = None, clean: bool = True) -> Any:
    """The JSON value of a text that another party wrote, with clean texts.

    Args:
        data: text, or its bytes.
        max_depth: how deeply it may be nested; None is as deep as Python reads.
        clean: False for the arguments of a call, which is answered as invalid where they are not clean.

    Raises:
        TooLarge: it is nested more deeply.
        ValueError: it is no JSON; the message is ours, not that of the library, which differs between versions.
    """
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
        text = clean_text(text) if clean else text
        value = json.loads(text)
    except RecursionError:
        raise TooLarge("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        there = shown(error.doc[error.pos : error.pos + 20])
        raise ValueError(f"it is no JSON from character {error.pos} on: {there}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text: {error.reason} at byte {error.start}") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ValueError(f"it is no JSON that can be read: {error}") from error
    if max_depth is not None and depth(value, max_depth) > max_depth:
        raise TooLarge(f"it is nested more than {max_depth} levels deep")
    return clean_json(value) if clean and _ESCAPED_HALF.search(text) else value


def depth(value: Any, enough: int) -> int:
    """How deeply lists and dictionaries are nested in each other, counted up to `enough` + 1."""
    level, levels = [value], 0
    while level and levels <= enough:
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
        levels += bool(nested)
    return levels


# --- values and exceptions in words -------------------------------------------------------------------------


def text_problem(text: Any, limit: int = MAX_TEXT_CHARS) -> str | None:
    """Why something is no text that is let in, as the rest of a sentence ("..., which is no text"), or None."""
    if not isinstance(text, str):
        return f"{shown(text)}, which is no text"
    if len(text) > limit:
        return f"{len(text):,} characters, and at most {limit:,} are read"
    return None


def words_of(error: BaseException) -> str:
    """`KeyError: 'name'`: the type of an exception and its own words. Never raises, whatever its `__str__` does."""
    said = message_of(error)
    return f"{_type_name(error)}: {said}" if said else _type_name(error)


def message_of(error: BaseException) -> str:
    """The words of an exception without its type. Never raises."""
    return _written(str, error, _WORDS)


def shown(value: Any, limit: int = _SHOWN) -> str:
    """The beginning of a value's `repr`. Never raises; a long text is not written out first."""
    if isinstance(value, str | bytes) and len(value) > limit:
        value = value[: limit + 1]
    return _written(repr, value, limit)


def _written(write: Callable[[Any], str], value: Any, limit: int) -> str:
    try:
        text = clean_text(str.__str__(write(value)))
    except KeyboardInterrupt:
        raise
    except BaseException:  # the boundary itself: foreign code that only had to say what it is
        return f"({_type_name(value)}, which cannot be put in words)"
    return text if len(text) <= limit else text[:limit] + "..."


def _type_name(value: Any) -> str:
    return clean_text(type.__dict__["__name__"].__get__(type(value)))
