"""Parses what the policy wrote into a turn: `raw text -> Turn`, in a named format.

>>> interpret('Let me look.<tool_call>{"name": "find", "arguments": {}}</tool_call>').calls[0].name
'find'

`hermes`, `qwen3_coder` and `llama3_json` are built in; others can be registered. A model's chat template tells which
one it writes (`tbx_envs.chat.detection`). Parsing never raises on what a policy wrote: an unreadable call becomes a
`BadCall` that the environment answers. Training, evaluation and served models share this module.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tbx_envs.chat import hermes, llama3_json, qwen3_coder
from tbx_envs.chat.parts import MAX_CALLS, TooManyCalls
from tbx_envs.doors import clean_text
from tbx_envs.errors import ConfigError, did_you_mean
from tbx_envs.messages import BadCall, Turn

# (raw text, ids for calls in order, tool -> JSON schema of its arguments) -> the turn. Must not raise on any text, but
# for `TooManyCalls` where it gives up on counting them.
Parser = Callable[[str, Iterator[str], Mapping[str, Mapping[str, Any]]], Turn]

NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

_FORMATS: dict[str, Parser] = {
    "hermes": hermes.parse,
    "llama3_json": llama3_json.parse,
    "qwen3_coder": qwen3_coder.parse,
}


def interpret(
    raw: str,
    chat_format: str = "hermes",
    *,
    first_call: int = 0,
    truncated: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] = NO_SCHEMAS,
) -> Turn:
    """The turn in `raw`.

    Args:
        raw: the policy's text without its end-of-turn token. Lone surrogates are replaced by U+FFFD, so that
            everything downstream can be encoded.
        chat_format: name of the format in which calls are written.
        first_call: number in the first call's id; the environment keeps counting over an episode.
        truncated: True when a token limit cut the text off; the turn records it, and its calls are not executed. A
            call that was cut off is not the policy's mistake: it becomes part of the text, not a `BadCall`.
        schemas: tool -> JSON schema of its arguments (`schemas_of`), for formats whose values carry no types.
            Arguments of a tool without a schema stay text.

    Raises:
        ConfigError: unknown format.
    """
    if chat_format not in _FORMATS:
        raise ConfigError(
            f"unknown chat format '{chat_format}'.{did_you_mean(chat_format, _FORMATS)} "
            f"Known: {', '.join(sorted(_FORMATS))}; add one with register_format."
        )
    ids = (f"call_{number}" for number in itertools.count(first_call))
    readable = clean_text(raw)
    try:
        turn = bounded(_FORMATS[chat_format](readable, ids, schemas), first_call)
    except TooManyCalls:
        turn = _too_many(readable, first_call)
    return _cut_off(turn, readable) if truncated else turn


def bounded(turn: Turn, first_call: int = 0) -> Turn:
    """`turn`, or one unreadable call in place of more calls than a turn may have: none of them is made.

    Which of thousands of calls were meant cannot be told, and the first ones are as likely wrong as the others.

    Args:
        first_call: number in the id of the turn's first call.
    """
    if len(turn.calls) <= MAX_CALLS:
        return turn
    written = "\n".join(call.raw if isinstance(call, BadCall) else call.name for call in turn.calls)
    return dataclasses.replace(_too_many(written, first_call), text=turn.text, reasoning=turn.reasoning)


def _too_many(raw: str, first_call: int) -> Turn:
    problem = f"The turn has more than {MAX_CALLS} calls, so none of them was made. Make fewer calls at once."
    return Turn(calls=(BadCall(f"call_{first_call}", raw, problem),))


def _cut_off(turn: Turn, raw: str) -> Turn:
    """`turn`, truncated, with the call that the cut left unfinished among its words."""
    last = turn.calls[-1] if turn.calls else None
    if isinstance(last, BadCall) and raw.rstrip().endswith(last.raw.rstrip()):
        text = "\n".join(filter(None, [turn.text, last.raw.strip()]))
        return dataclasses.replace(turn, text=text, calls=turn.calls[:-1], truncated=True)
    return dataclasses.replace(turn, truncated=True)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tool -> JSON schema of its arguments, from OpenAI-function style dictionaries."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def register_format(name: str, parser: Parser) -> None:
    """Register `parser` as the format `name`.

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
