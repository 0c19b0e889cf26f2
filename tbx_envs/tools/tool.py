"""Tools as plain functions: declared by `@tool`, described by a schema of our own wording.

A tool takes a `ToolContext` and typed keyword arguments and returns something with a JSON form, or raises
`ToolRejection` to say no. It knows no protocol. The schema is derived here, not by a library, so that the text a
model reads does not change when a dependency is upgraded.

    @tool(mutates=True)
    def cancel_visit(
        context: ToolContext, *, visit_id: Annotated[str, "Id of the visit, for example V12."]
    ) -> dict[str, Any]:
        '''Cancel a booked visit.'''
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection

from tbx_envs.errors import DomainError
from tbx_envs.tools.clock import WorldClock

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


class ToolRejection(Exception):
    """A tool rejects a call. The model reads the message: it is an answer, not a fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may use: the episode's database (one transaction per call, committed by the caller) and clock."""

    db: Connection
    clock: WorldClock


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the agent sees it, and the function behind it.

    Attributes:
        name: tool name, unique within a domain.
        description: text that the model reads; changing it changes the benchmark.
        input_schema: JSON schema of the arguments; treated as immutable.
        mutates: True when a successful call changes a row.
        function: implementation, called as `function(context, **arguments)` with validated arguments.
    """

    name: str
    description: str
    input_schema: Mapping[str, Any]
    mutates: bool
    function: Callable[..., Any]


def tool(*, mutates: bool) -> Callable[[Callable[..., Any]], Tool]:
    """Declare a function as a tool; its docstring and `Annotated` parameters are the text that the model reads.

    Parameters may be `str`, `int`, `float`, `bool`, `Literal[...]` of strings, `list` of one of these, or any of
    them `| None` with default None.

    Args:
        mutates: True when a successful call changes a row.

    Raises:
        DomainError: a parameter has no description, or a type without a schema.
    """

    def declare(function: Callable[..., Any]) -> Tool:
        description = inspect.getdoc(function)
        if not description:
            raise DomainError(f"tool {function.__name__} has no docstring; the model reads it, so write one.")
        return Tool(function.__name__, description, _input_schema(function), mutates, function)

    return declare


def _input_schema(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        hint = hints[parameter.name]
        if typing.get_origin(hint) is not typing.Annotated:
            raise DomainError(
                f"tool {function.__name__}: parameter {parameter.name} has no description; "
                f'write Annotated[<type>, "what it is"].'
            )
        annotated_type, description = typing.get_args(hint)[:2]
        schema = _type_schema(function.__name__, parameter.name, annotated_type)
        properties[parameter.name] = {**schema, "description": description}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _type_schema(tool_name: str, parameter: str, hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = next(argument for argument in arguments if argument is not type(None))
        return _type_schema(tool_name, parameter, inner)
    if origin is typing.Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type_schema(tool_name, parameter, arguments[0])}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    raise DomainError(
        f"tool {tool_name}: parameter {parameter} is {hint!r}, which has no schema here; use str, int, float, bool, "
        f"Literal of strings, a list of one of these, or one of them | None."
    )
