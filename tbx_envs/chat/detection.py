"""Which format a chat template writes: two calls are rendered by it, and the format that reads them back is the one.

Nothing is known here of models and their names, so a fine-tuned or renamed model is no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tbx_envs.chat.interpretation import interpret, known_formats, schemas_of
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Message, Text, ToolCall, Turn, to_chat

# (messages as chat dictionaries) -> the text that the template makes of them
Render = Callable[[list[dict[str, Any]]], str]

_USER = Text("user", "a")
_MARK = "zqz"
_CALLS = (
    ToolCall("call_0", "find", {"name": 'Åse "A" {b} <c>', "limit": 3}),
    ToolCall("call_0", "note", {"text": "1", "tags": ["a", {"b": "é"}], "urgent": True}),
)


def _parameters(**types: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


def _tool(name: str, description: str, /, **types: str) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": _parameters(**types)}
    return {"type": "function", "function": function}


# The tools that probe conversations use, here and in `tbx_envs.chat.template`.
PROBE_TOOLS: Sequence[dict[str, Any]] = (
    _tool("find", "Finds a customer.", name="string", limit="integer"),
    _tool("note", "Writes a note.", text="string", tags="array", urgent="boolean"),
    _tool("close", "Closes the case."),
)
PROBE_SCHEMAS = schemas_of(PROBE_TOOLS)


def written_format(render: Render) -> str:
    """The name of the format in which a template writes calls.

    Raises:
        ConfigError: it leaves calls out, or none of the known formats reads them back.
    """
    texts = [_call_as_written(render, call) for call in _CALLS]
    for name in known_formats():
        if all(
            interpret(text, name, schemas=PROBE_SCHEMAS).calls == (call,)
            for text, call in zip(texts, _CALLS, strict=True)
        ):
            return name
    if not any(call.name in text for text, call in zip(texts, _CALLS, strict=True)):
        raise ConfigError(
            "the chat template leaves out tool calls, so the policy could never be shown one. Use a template with "
            "tools; for a model that was taught ChatML: tbx export POLICY FOLDER --chat-template tools"
        )
    raise ConfigError(
        f"the chat template writes a call as {texts[0]!r}, which no known format reads back: "
        f"{', '.join(known_formats())}. Add a parser for it with tbx_envs.chat.interpretation.register_format."
    )


def _call_as_written(render: Render, call: ToolCall) -> str:
    """What of a rendered conversation differs between an answer in words and this call: the call alone."""

    def rendered(turn: Turn) -> str:
        conversation: list[Message] = [_USER, turn]
        return render(to_chat(conversation))

    words, called = rendered(Turn(text=_MARK)), rendered(Turn(calls=(call,)))
    start = next((i for i, pair in enumerate(zip(words, called, strict=False)) if pair[0] != pair[1]), 0)
    behind = words[words.rindex(_MARK) + len(_MARK) :] if _MARK in words else ""
    return called[start:].removesuffix(behind)


def format_of_template(template: str, **options: Any) -> str:
    """The name of the format in which `template`, the text of a chat template, writes calls.

    Args:
        template: Jinja, as models ship it.
        options: variables for the template (`enable_thinking`, `bos_token`).

    Raises:
        ConfigError: as in `written_format`, or the template cannot be rendered.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(chat: list[dict[str, Any]]) -> str:
        try:
            (text,), _ = render_jinja_template([chat], tools=list(PROBE_TOOLS), chat_template=template, **options)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the chat template cannot render a user and an answer: {error}. Use a template that knows system, "
                f"user, assistant and tool messages."
            ) from error
        return text

    return written_format(render)
