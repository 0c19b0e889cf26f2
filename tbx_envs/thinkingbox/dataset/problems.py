"""Errors in a dataset's files, collected so that all of them can be fixed at once.

Readers raise `DatasetProblems` with every problem that they find; code that calls several readers calls them through a
`ProblemCollector` and raises once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tbx_envs.errors import DomainError

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One error in a file.

    Attributes:
        path: path of the file.
        line: line number, from 1; None when there is no single line.
        text: what is wrong and what to do.
    """

    path: Path
    line: int | None
    text: str

    def described(self, root: Path | None = None) -> str:
        """One line for people; paths below `root` are relative to it."""
        inside = root is not None and self.path.is_relative_to(root)
        name = self.path.relative_to(root) if root is not None and inside else self.path
        return f"{name}{f' line {self.line}' if self.line else ''}: {self.text}"


class DatasetProblems(DomainError):
    """Files of a dataset have errors.

    Attributes:
        problems: the errors, without duplicates.
    """

    def __init__(self, problems: Iterable[Problem], heading: str = "", root: Path | None = None) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        heading = heading or "the dataset's files cannot be used"
        lines = [f"{heading}: {len(self.problems)} problem(s):", *(f"  {p.described(root)}" for p in self.problems)]
        super().__init__("\n".join(lines))


def problem(path: Path, line: int | None, text: str) -> DatasetProblems:
    """An exception with a single problem."""
    return DatasetProblems([Problem(path, line, text)])


class ProblemCollector:
    """Calls readers and collects the problems that they raise."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, reader: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The reader's result; None when it raised problems, which are kept for `finish`."""
        try:
            return reader(*args, **kwargs)
        except DatasetProblems as found:
            self.problems.extend(found.problems)
            return None

    def finish(self, heading: str = "", root: Path | None = None) -> None:
        """Raise all problems that were collected.

        Raises:
            DatasetProblems: there are problems.
        """
        if self.problems:
            raise DatasetProblems(self.problems, heading, root)
