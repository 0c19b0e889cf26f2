"""Arguments of a call: coerced where harmless, checked against the tool's schema, rejected with our own wording.

What is coerced, and nothing else:

    schema says   the policy wrote                            becomes
    integer       "35", " -3 ", 35.0                          35, -3, 35
    number        "3.5", "7"                                  3.5, 7.0
    boolean       "true", "False"                             True, False
    string        35 (an integer, not a boolean)              "35"
    array         '["a", "b"]' (text that is a JSON array)    ["a", "b"], then each item as above
    optional      null                                        not given

Everything that SQLite or a transport could not carry is rejected here, so that no text a policy writes can break a
tool: integers beyond 64 bits, NaN and infinities, lone surrogates, objects that have no JSON form.

The model reads these messages, so they never contain text of a library (`tests/tbx_envs/tools/test_arguments.py` pins
them): jsonschema decides, this module words the result.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from tbx_envs.errors import did_you_mean
from tbx_envs.tools.tool import Tool

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}(\.[0-9]{1,19})?([eE][+-]?[0-9]{1,3})?")
_INT64 = 2**63
_SHOWN = 60  # characters of a wrong value that an answer repeats
_LONGEST_PATH = 200  # characters of a name, or of where a value stands, that an answer repeats
_MOST_PROBLEMS = 16  # of one call that an answer names: text of megabytes can be wrong in a hundred thousand places
_DEEPEST = 20  # nesting beyond this is rejected before any recursive code sees it


class InvalidCall(Exception):
    """A call that was not made, since its name or its arguments are wrong. The model reads the message."""


def find_tool(tools: Mapping[str, Tool], name: Any) -> Tool:
    """The tool with that name.

    Raises:
        InvalidCall: there is no such tool; the message names the nearest and lists all.
    """
    if isinstance(name, str) and name in tools:
        return tools[name]
    near = did_you_mean(name, tools) if isinstance(name, str) else ""
    raise InvalidCall(f"There is no tool {_shown(name)}.{near} Tools: {', '.join(tools)}.")


def checked_arguments(tool: Tool, arguments: Any) -> dict[str, Any]:
    """New arguments for `tool.function`: coerced and valid.

    Raises:
        InvalidCall: the arguments are wrong; the message lists all problems at once.
    """
    if not isinstance(arguments, Mapping):
        problem = f"Arguments must be a JSON object, got {_shown(arguments)}."
        raise InvalidCall(_rejection(tool, [problem]))
    properties: Mapping[str, Any] = tool.input_schema.get("properties", {})
    required: Sequence[str] = tool.input_schema.get("required", ())
    known: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in arguments.items():
        if len(problems) > _MOST_PROBLEMS:
            break
        if name not in properties:
            near = did_you_mean(name, properties) if isinstance(name, str) else ""
            problems.append(f"Unknown argument {_shown(name)}.{near}")
        elif value is None:
            if name in required:
                problems.append(f"{name} must be {_wanted(properties[name])}, got null.")
        elif unfit := _cannot_be_carried(value):
            problems.append(f"{name} {unfit}.")
        else:
            known[name] = _coerced(properties[name], value)
    problems += [f"{name} is required and missing." for name in required if name not in arguments]
    errors = (error for error in _validator(tool).iter_errors(known) if error.validator != "required")
    problems += [_problem(error) for error in itertools.islice(errors, max(0, _MOST_PROBLEMS + 1 - len(problems)))]
    if problems:
        raise InvalidCall(_rejection(tool, problems))
    return known


def transport_problem(name: Any, arguments: Any) -> str | None:
    """Why a call cannot be sent to a server, or None. Servers check the rest (`checked_arguments`)."""
    if not isinstance(name, str) or _cannot_be_carried(name):
        return f"There is no tool {_shown(name)}."
    name = name[:_LONGEST_PATH]
    if not isinstance(arguments, Mapping):
        return f"{name} was not called. Arguments must be a JSON object, got {_shown(arguments)}."
    for key, value in arguments.items():
        if not isinstance(key, str) or _cannot_be_carried(key):
            return f"{name} was not called. Unknown argument {_shown(key)}."
        if unfit := _cannot_be_carried(value):
            return f"{name} was not called. {_shown_key(key)} {unfit}."
    return None


# JSON Schema calls 1e300 an integer; a tool and SQLite do not.
_Validator = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)
_validators: dict[int, tuple[Tool, Validator]] = {}


def _validator(tool: Tool) -> Validator:
    """The tool's validator, compiled once. Keyed by identity (schemas do not hash); the stored tool pins the id."""
    entry = _validators.get(id(tool))
    if entry is None or entry[0] is not tool:
        entry = _validators[id(tool)] = (tool, _Validator(dict(tool.input_schema)))
    return entry[1]


def _cannot_be_carried(value: Any, depth: int = 0) -> str | None:
    """Why `value` cannot be passed to a tool (worded to follow the argument's name), or None."""
    match value:
        case None | bool():
            return None
        case str():
            if value.isascii():
                return None
            surrogate = any("\ud800" <= character <= "\udfff" for character in value)
            return "contains half a surrogate pair, which is no valid text" if surrogate else None
        case int():
            return None if -_INT64 <= value < _INT64 else "is beyond 64 bits"
        case float():
            return None if math.isfinite(value) else "must be a finite number"
        case list() | tuple():
            inner: Iterable[Any] = value
        case Mapping():
            inner = [*value.keys(), *value.values()]
            if not all(isinstance(key, str) for key in value):
                return "is not JSON"
        case _:
            return "is not JSON"
    if depth >= _DEEPEST:
        return "is nested too deeply"
    return next(filter(None, (_cannot_be_carried(item, depth + 1) for item in inner)), None)


def _coerced(schema: Mapping[str, Any], value: Any) -> Any:
    """`value` in the schema's type where that loses nothing, else unchanged."""
    match schema.get("type"), value:
        case "integer", str():
            text = value.strip()
            if _INTEGER.fullmatch(text) and -_INT64 <= int(text) < _INT64:
                return int(text)
        case "integer", float() if value.is_integer() and abs(value) < 2**53:  # beyond that, floats skip integers
            return int(value)
        case "number", str():
            text = value.strip()
            if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
                return float(text)
        case "boolean", str():
            return {"true": True, "false": False}.get(value.strip().lower(), value)
        case "string", int() if not isinstance(value, bool):
            return str(value)
        case "array", str():
            return _coerced_array(schema, value)
        case "array", list() | tuple():
            return [_coerced(schema.get("items", {}), item) for item in value]
    return value


def _coerced_array(schema: Mapping[str, Any], text: str) -> Any:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(items, list) or _cannot_be_carried(items):
        return text
    return [_coerced(schema.get("items", {}), item) for item in items]


def _rejection(tool: Tool, problems: Sequence[str]) -> str:
    properties = tool.input_schema.get("properties", {})
    required = tool.input_schema.get("required", ())
    described = [
        f"{name} ({_kind(schema)}{', required' if name in required else ''})" for name, schema in properties.items()
    ]
    if len(problems) > _MOST_PROBLEMS:
        problems = [*problems[:_MOST_PROBLEMS], "And more like these."]
    arguments = f"Its arguments: {', '.join(described)}." if described else "It takes no arguments."
    return f"{tool.name} was not called. {' '.join(problems)} {arguments}"


def _problem(error: ValidationError) -> str:
    """One problem that jsonschema found, in our own wording."""
    path = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in error.absolute_path)[:_LONGEST_PATH]
    wanted = _wanted(error.schema) if isinstance(error.schema, Mapping) else "something else"
    if error.validator in ("type", "enum"):
        near = ""
        if error.validator == "enum" and isinstance(error.instance, str):
            options = error.validator_value if isinstance(error.validator_value, list) else []
            near = did_you_mean(error.instance, [option for option in options if isinstance(option, str)])
        return f"{path or 'The object'} must be {wanted}, got {_shown(error.instance)}.{near}"
    rule = f"{error.validator} {_shown(error.validator_value)}"
    return f"{path or 'The object'} breaks the rule {rule}, got {_shown(error.instance)}."


def _wanted(schema: Mapping[str, Any]) -> str:
    kind = _kind(schema)
    return kind if kind.startswith(("one of", "any")) else f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(_shown(option) for option in schema['enum'])}"
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any value"))


def _shown_key(key: str) -> str:
    return key if len(key) <= _SHOWN else key[:_SHOWN] + "..."


def _shown(value: Any) -> str:
    """`value` as JSON, cut to `_SHOWN` characters; never raises, never contains half of a surrogate pair."""
    if isinstance(value, str):
        value = value[: _SHOWN + 1]
    elif not isinstance(value, bool | int | float | None) and _cannot_be_carried(value):
        return "something that is not JSON"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "an enormous number"
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN + 2 else text[:_SHOWN] + "..."
