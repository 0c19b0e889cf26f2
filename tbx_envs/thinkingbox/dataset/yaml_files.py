"""Reads the YAML of a dataset, in whole files and in strings in Python files, as JSON values.

Servers receive JSON, so YAML is converted to it here: dates become ISO 8601 text, keys become text, and values without
a JSON form are problems. libyaml is used where it is installed; line numbers are only computed for problems.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tbx_envs.doors import clean_text
from tbx_envs.files import parsed_yaml
from tbx_envs.thinkingbox.dataset.file_cache import cached_json
from tbx_envs.thinkingbox.dataset.problems import problem

_DEEPEST = 200  # levels; Python's own limit differs between its versions
_TOO_DEEP = "this YAML is nested too deeply; make it flatter"


@dataclasses.dataclass(frozen=True, slots=True)
class YamlText:
    """YAML and its place.

    Attributes:
        path: path of the file.
        text: YAML text.
        first_line: line of the text's beginning in the file, from 1.
    """

    path: Path
    text: str
    first_line: int = 1

    def line_of(self, keys: Sequence[str | int] = ()) -> int:
        """The line in the file of the value that the keys lead to, or of the last one that exists."""
        line, node = 0, _composed(self.text)
        for key in keys:
            found = _child(node, key)
            if found is None:
                break
            line, node = found
        return self.first_line + line


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        DatasetProblems: there is no such file, or it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise problem(path, None, "there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise problem(path, None, f"cannot be read: {error}") from error


def load_yaml(source: YamlText) -> Any:
    """The JSON value of a YAML text; None for an empty one.

    Raises:
        DatasetProblems: the text is not YAML, or has a value without a JSON form.
    """

    def read(text: str) -> Any:
        try:
            return _json_value(_parsed(source, text), source, (), frozenset())
        except RecursionError:
            raise problem(source.path, source.first_line, _TOO_DEEP) from None

    return cached_json("yaml", source.text, read)


def load_mapping(source: YamlText, what: str) -> dict[str, Any]:
    """The mapping in a YAML text.

    Args:
        source: text to read.
        what: kind of text, for the message.

    Raises:
        DatasetProblems: the text is not a mapping.
    """
    value = load_yaml(source)
    if not isinstance(value, dict):
        kind = "empty" if value is None else f"a {type(value).__name__}"
        raise problem(source.path, source.line_of(), f"{what} must be a mapping of keys to values; it is {kind}")
    return value


def _parsed(source: YamlText, text: str) -> Any:
    import yaml

    try:
        return parsed_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = max(len(text.splitlines()) - 1, 0)  # the mark of something missing at the end is beyond the last line
        line = source.first_line + min(mark.line if mark else 0, last)
        said = ", ".join(filter(None, [error.context, error.problem]))
        raise problem(source.path, line, f"this is not YAML: {said}") from error
    except (yaml.YAMLError, ValueError) as error:  # an invalid character or date
        said = " ".join(str(error).split())
        raise problem(source.path, source.first_line, f"this is not YAML: {said}") from error


def _json_value(value: Any, source: YamlText, keys: tuple[str | int, ...], above: frozenset[int]) -> Any:
    if len(keys) > _DEEPEST:
        raise problem(source.path, source.first_line, _TOO_DEEP)
    match value:
        case None | bool() | int():
            return value
        case str():
            return clean_text(value)
        case float():
            if math.isfinite(value):
                return value
        case datetime.date():  # a datetime is one, too
            return value.isoformat()
        case dict() | list() | tuple() if id(value) in above:
            raise problem(source.path, source.line_of(keys), "an alias inside of the value that it names never ends")
        case dict():
            inside = above | {id(value)}
            return {_key(key): _json_value(item, source, (*keys, _key(key)), inside) for key, item in value.items()}
        case list() | tuple():
            inside = above | {id(value)}
            return [_json_value(item, source, (*keys, number), inside) for number, item in enumerate(value)]
    raise problem(
        source.path,
        source.line_of(keys),
        f"'{'.'.join(map(str, keys))}' is {value!r}, which has no JSON form; write text or a number",
    )


def _key(key: Any) -> str:
    """A key in its JSON form."""
    match key:
        case str():
            return clean_text(key)
        case None | bool():
            return {None: "null", True: "true", False: "false"}[key]
        case datetime.date():
            return key.isoformat()
        case _:
            return str(key)


@functools.lru_cache(maxsize=16)
def _composed(text: str) -> Any:
    """The node tree, with lines; None for a text that is not YAML."""
    import yaml

    try:
        return yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return None


def _child(node: Any, key: str | int) -> tuple[int, Any] | None:
    """Line and node of an entry of a mapping or a sequence."""
    if isinstance(key, int):
        children = node.value if getattr(node, "id", None) == "sequence" else []
        return (children[key].start_mark.line, children[key]) if key < len(children) else None
    for name, value in node.value if getattr(node, "id", None) == "mapping" else []:
        if getattr(name, "value", None) == key:
            return name.start_mark.line, value
    return None
