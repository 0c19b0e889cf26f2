"""Detects the call format of a chat template: it renders two calls, and its format is the one that reads both back.

Detection does not depend on the names of models, so a fine-tuned or renamed model is no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tbx_envs.chat.interpretation import interpret, known_formats, schemas_of
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Message, Text, ToolCall, Turn, to_chat

# (messages as chat dictionaries) -> rendered text
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


# Tools of the probe conversations, here, in `tbx_envs.chat.template` and in its check.
PROBE_TOOLS: Sequence[dict[str, Any]] = (
    _tool("find", "Finds a customer.", name="string", limit="integer"),
    _tool("note", "Writes a note.", text="string", tags="array", urgent="boolean"),
    _tool("close", "Closes the case."),
)
PROBE_SCHEMAS = schemas_of(PROBE_TOOLS)


def written_format(render: Render) -> str:
    """Name of the format in which a template writes calls.

    Raises:
        ConfigError: the template leaves calls out, or none of the known formats reads them back.
    """
    texts = [_call_as_written(render, call) for call in _CALLS]
    for name in known_formats():
        read = [interpret(text, name, schemas=PROBE_SCHEMAS) for text in texts]
        if [turn.calls for turn in read] == [(call,) for call in _CALLS] and not any(turn.num_lenient for turn in read):
            return name
    if not any(call.name in text for text, call in zip(texts, _CALLS, strict=True)):
        raise ConfigError(
            "the chat template leaves out tool calls, so the policy could never be shown one. Use a template that "
            "renders them; for a model trained on ChatML: tbx export POLICY FOLDER --chat-template tools"
        )
    raise ConfigError(
        f"the chat template writes a call as {texts[0]!r}, which no known format reads back: "
        f"{', '.join(known_formats())}. Add a parser for it with tbx_envs.chat.interpretation.register_format."
    )


def _call_as_written(render: Render, call: ToolCall) -> str:
    """The text of the call alone: what differs between the conversation with this call and with a text answer."""

    def rendered(turn: Turn) -> str:
        conversation: list[Message] = [_USER, turn]
        return render(to_chat(conversation))

    words, called = rendered(Turn(text=_MARK)), rendered(Turn(calls=(call,)))
    start = next((i for i, pair in enumerate(zip(words, called, strict=False)) if pair[0] != pair[1]), 0)
    behind = words[words.rindex(_MARK) + len(_MARK) :] if _MARK in words else ""
    return called[start:].removesuffix(behind)


def format_of_template(template: str, **options: Any) -> str:
    """Name of the format in which a chat template writes calls.

    Args:
        template: Jinja source, as models ship it.
        options: variables of the template (`enable_thinking`, `bos_token`).

    Raises:
        ConfigError: as in `written_format`, or the template cannot be rendered.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(chat: list[dict[str, Any]]) -> str:
        try:
            rendered = render_jinja_template([chat], tools=list(PROBE_TOOLS), chat_template=template, **options)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the chat template cannot render a user and an answer: {error}. Use a template that knows system, "
                f"user, assistant and tool messages."
            ) from error
        return rendered[0][0]  # ([text of each conversation], [spans of the assistant's messages])

    return written_format(render)
