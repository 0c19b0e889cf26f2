"""What the policy wrote, read as a turn: `raw text -> Turn`, in a named format.

>>> interpret('Let me look.<tool_call>{"name": "find", "arguments": {}}</tool_call>').calls[0].name
'find'

`hermes` is built in; others register themselves. Reading never raises on what a policy wrote: what cannot be
read becomes a `BadCall` that the environment answers. Training, evaluation and served models share it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from tbx_envs.chat import hermes
from tbx_envs.errors import ConfigError, did_you_mean
from tbx_envs.messages import Turn

# (raw text, ids for calls in order) -> the turn. Must not raise on any text.
Parser = Callable[[str, Iterator[str]], Turn]

_FORMATS: dict[str, Parser] = {"hermes": hermes.parse}


def interpret(raw: str, chat_format: str = "hermes", *, first_call: int = 0, truncated: bool = False) -> Turn:
    """The turn that `raw` says.

    Args:
        raw: the policy's text without its end-of-turn token. Lone surrogates are replaced by U+FFFD, so that
            everything downstream can be encoded.
        chat_format: how calls are written.
        first_call: number of the first call's id; the environment counts on over an episode.
        truncated: a token limit cut the text off; the turn says so, and its calls are not executed.

    Raises:
        ConfigError: unknown format.
    """
    if chat_format not in _FORMATS:
        raise ConfigError(
            f"unknown chat format '{chat_format}'.{did_you_mean(chat_format, _FORMATS)} "
            f"Known: {', '.join(sorted(_FORMATS))}; add one with register_format."
        )
    ids = (f"call_{number}" for number in itertools.count(first_call))
    readable = raw if raw.isascii() else raw.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    turn = _FORMATS[chat_format](readable, ids)
    return dataclasses.replace(turn, truncated=True) if truncated else turn


def register_format(name: str, parser: Parser) -> None:
    """Make `parser` known as the format `name`.

    Raises:
        ConfigError: the name is taken; a format is never replaced silently.
    """
    if name in _FORMATS:
        raise ConfigError(
            f"chat format '{name}' is registered already ({_FORMATS[name].__module__}). Choose another name."
        )
    _FORMATS[name] = parser


def known_formats() -> tuple[str, ...]:
    """Names that `interpret` knows, sorted."""
    return tuple(sorted(_FORMATS))
