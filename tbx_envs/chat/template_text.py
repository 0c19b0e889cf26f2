"""TemplateText: a tokenizer's chat template as a function from messages to text, with fixed dates.

Rendering is done by transformers (`apply_chat_template`), so spacing, key order and escapes of JSON are those that a
server of the model uses. Two things are added: templates that write today's date (`date_string`, `strftime_now`) get a
fixed one, and the names of a template's variables are checked.
"""

from __future__ import annotations

import datetime
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from tbx_envs.chat.template_bounds import excess
from tbx_envs.errors import ConfigError, did_you_mean

# The date in Llama's templates when none is given.
FIXED_NOW = datetime.datetime(2024, 7, 26)

_LLAMA_DATE = "%d %b %Y"
_ASKS_FOR_DATE = re.compile(r"strftime_now\s*\(")
_ASKS_IN_FORMAT = re.compile(r"""strftime_now\s*\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")
# Jinja drops the line break after the block, so the beginning of the template does not change.
_FIXED_DATES = "{% macro strftime_now(format) %}{{ tbx_dates[format] }}{% endmacro %}\n"


class TemplateText:
    """Renders conversations.

    Args:
        tokenizer: transformers tokenizer with a chat template; if it has several, the one for tools is always used.
        options: variables of the template, such as `enable_thinking`.
        now: moment whose date the template shows.

    Raises:
        ConfigError: there is no template, it takes too much to render, it reads the date in a way that cannot be fixed,
            or it does not read one of the options.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], now: datetime.datetime) -> None:
        self._apply = tokenizer.apply_chat_template
        try:
            source: str = tokenizer.get_chat_template(None, [{}])
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer has no chat template ({error}). Put chat_template.jinja into the model's folder."
            ) from error
        if (reason := excess(source)) is not None:
            raise ConfigError(
                f"the tokenizer's chat template {reason}. Put the template of the model's authors into the policy's "
                f"folder."
            )
        _require_known(options, source, taken=inspect.signature(self._apply).parameters)
        self._options = dict(options)
        self._now = now
        self._shows_llama_date = "date_string" in source and "date_string" not in options
        self._date_formats = _date_formats(source)
        self._source = _FIXED_DATES + source if self._date_formats else source

    def render(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
        now: datetime.datetime | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            chat: messages as `tbx_envs.messages.to_chat` returns them.
            tools: OpenAI-function style dictionaries, rendered in the order of their keys.
            generation_prompt: whether to append what the template puts in front of the policy's next turn.
            now: moment to use instead of the one given to the constructor.

        Raises:
            ConfigError: the template cannot render the conversation.
        """
        try:
            return self._apply(
                chat,
                chat_template=self._source,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options,
                **self._dates(now or self._now),
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(message["role"] for message in chat)
            raise ConfigError(
                f"the tokenizer's chat template cannot render [{roles}]: {error}. Use a template that "
                f"knows system, user, assistant and tool messages."
            ) from error

    def _dates(self, now: datetime.datetime) -> dict[str, Any]:
        dates: dict[str, Any] = {"date_string": now.strftime(_LLAMA_DATE)} if self._shows_llama_date else {}
        if self._date_formats:
            dates["tbx_dates"] = {written: now.strftime(written) for written in self._date_formats}
        return dates


def _date_formats(source: str) -> tuple[str, ...]:
    """Formats in which the template reads today's date."""
    formats = [double or single for double, single in _ASKS_IN_FORMAT.findall(source)]
    if len(formats) < len(_ASKS_FOR_DATE.findall(source)):
        raise ConfigError(
            "the chat template asks for today's date in a format that is computed, so it cannot be given a fixed date "
            "and its prompts would change from day to day. Write the format into strftime_now(...) of the template."
        )
    return tuple(sorted(set(formats)))


def _require_known(options: Mapping[str, Any], source: str, taken: Mapping[str, Any]) -> None:
    words = set(re.findall(r"[A-Za-z_]\w*", source))
    problems = [
        f"'{name}' is not read by it.{did_you_mean(name, words)}" if name not in words else f"'{name}' is not its own."
        for name in options
        if name not in words or name in taken or name in ("messages", "tbx_dates")
    ]
    if problems:
        raise ConfigError(f"options of the chat template: {' '.join(problems)} Give variables that the template reads.")
