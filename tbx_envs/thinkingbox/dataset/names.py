"""Finds tests: in folders, by the name `file.py:test`, and in lists of names.

A name does not contain the folder of its file in `test_case/`: `a_b_c.py` is searched there, then in the folders `a_b`
and `a`, and the first match wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Problem, problem

ENDINGS = (".py", ".yaml")


def test_files_in(folder: Path) -> list[Path]:
    """Every test file below a folder, in the order of their paths."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in ENDINGS
        and not path.name.endswith(".meta.yaml")
        and path.name != "conftest.yaml"
        and path.is_file()
    )


def find_test_file(folder: Path, name: str) -> Path | None:
    """The test file with that name; None when it is in none of the places that its name allows.

    Args:
        folder: `test_case/` of a dataset.
        name: file name with its ending; may contain a folder below `test_case/`.
    """
    words = name.split("_")
    prefixes = ["_".join(words[:number]) for number in range(len(words) - 1, 0, -1)]
    for path in (folder / name, *(folder / prefix / name for prefix in prefixes)):
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return path
    return None


def split_name(name: str) -> tuple[str, str] | None:
    """File and test of `file.py:test`; None when the name has another form."""
    file, _, test = name.partition(":")
    return (file, test) if file and test and ":" not in test else None


def uid_of_name(name: str) -> str:
    """The uid of a name in a test list, whose file may have a folder; a name of another form is returned as it is.

    >>> uid_of_name("rentals/rentals_1.py:test_a")
    'rentals_1.py:test_a'
    """
    file, colon, test = name.partition(":")
    return f"{Path(file).name}:{test}" if colon else name


def read_test_list(path: Path) -> tuple[str, ...]:
    """The names in a test list: a YAML list of `file.py:test`.

    Raises:
        DatasetProblems: the file is not such a list, or names a test twice.
    """
    from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_yaml, read_text

    source = YamlText(path, read_text(path))
    names = load_yaml(source)
    if not isinstance(names, list) or not names:
        raise problem(path, 1, "a test list is a YAML list of names such as `- file.py:test`; this is not")
    problems = []
    for number, name in enumerate(names):
        if not isinstance(name, str):
            problems.append(
                Problem(path, source.line_of([number]), f"{name!r} is not a name; write file.py:test in quotes")
            )
        elif names.index(name) < number:
            first = source.line_of([names.index(name)])
            problems.append(
                Problem(path, source.line_of([number]), f"'{name}' is already at line {first}; name it once")
            )
    if problems:
        raise DatasetProblems(problems)
    return tuple(names)


def line_of_name(path: Path, name: str) -> int | None:
    """The line of a name in a test list; also finds names that are listed with a folder. None when it is missing."""
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8").split("\n")
    return next(
        (number for number, line in enumerate(lines, start=1) if re.search(rf"{re.escape(name)}(?![\w:])", line)), None
    )


def release_lists(releases: Path) -> Mapping[str, Path]:
    """Name -> test list of each release: `releases/<name>/testlist_*.yaml`.

    In a release with several lists, each has the name `<name>/<text after testlist_>`.
    """
    lists: dict[str, Path] = {}
    for folder in sorted(path for path in releases.glob("*") if path.is_dir()):
        found = sorted(folder.glob("testlist_*.yaml"))
        for path in found:
            name = folder.name if len(found) == 1 else f"{folder.name}/{path.stem.removeprefix('testlist_')}"
            lists[name] = path
    return lists


def repeated(names: Iterable[Any]) -> list[Any]:
    """The names that occur more than once, each once, in order."""
    seen: set[Any] = set()
    twice: dict[Any, None] = {}
    for name in names:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return list(twice)
