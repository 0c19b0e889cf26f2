"""One call of a tool in one transaction, shared by every backend and the replay of expected calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from tbx_envs.doors import clean_text, message_of, shown, words_of
from tbx_envs.errors import ToolFault
from tbx_envs.tools.arguments import InvalidCall, checked_arguments, find_tool
from tbx_envs.tools.clock import WorldClock
from tbx_envs.tools.session import Answer
from tbx_envs.tools.tool import Tool, ToolContext, ToolRejection

_SHOWN = 2000  # characters of a call's arguments that a message repeats


def answer_call(tools: Mapping[str, Tool], db: Connection, clock: WorldClock, name: Any, arguments: Any) -> Answer:
    """Validate and run a call; commit if the tool succeeded, otherwise leave the database as it was.

    Raises:
        ToolFault: the tool raised anything but `ToolRejection`, or returned a value without a JSON form.
    """
    try:
        tool = find_tool(tools, name)
        checked = checked_arguments(tool, arguments)
    except InvalidCall as problem:
        return Answer(str(problem), "invalid")
    committed = False
    try:
        text = _as_text(tool.function(ToolContext(db, clock), **checked))
        db.commit()
        committed = True
        return Answer(text, "ok")
    except ToolRejection as rejection:
        return Answer(message_of(rejection), "rejected")
    except (Exception, SystemExit) as error:  # the episode boundary: anything else voids the episode
        raise ToolFault(
            f"tool {name} called with {shown(checked, _SHOWN)} raised {words_of(error)}. The episode is void. Fix the "
            f"tool; to say no, it raises ToolRejection."
        ) from error
    finally:
        if not committed:
            db.rollback()


def _as_text(result: Any) -> str:
    """The text for the model, cleaned (MCP would not carry half of a surrogate pair): text as it is, anything else as
    JSON in the order in which the tool wrote it."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False)
    return clean_text(text)
