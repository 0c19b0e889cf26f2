"""What is wrong with a dataset's files, collected: whoever mends one file wants to know of all of them.

Readers raise `DatasetProblems`, with every problem they can tell; whoever calls several readers lets a `Gathering`
call them and raises once.
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
    """One thing that is wrong.

    Attributes:
        path: of the file.
        line: where it stands, from 1; None where no line can be named.
        text: what is wrong and what to do.
    """

    path: Path
    line: int | None
    text: str

    def told(self, root: Path | None = None) -> str:
        """One line for people; paths below `root` are told relative to it."""
        inside = root is not None and self.path.is_relative_to(root)
        name = self.path.relative_to(root) if root is not None and inside else self.path
        return f"{name}{f' line {self.line}' if self.line else ''}: {self.text}"


class DatasetProblems(DomainError):
    """Files of a dataset are wrong; `problems` has each once."""

    def __init__(self, problems: Iterable[Problem], heading: str = "", root: Path | None = None) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        heading = heading or "the dataset's files cannot be used"
        lines = [f"{heading}: {len(self.problems)} problem(s):", *(f"  {p.told(root)}" for p in self.problems)]
        super().__init__("\n".join(lines))


def problem(path: Path, line: int | None, text: str) -> DatasetProblems:
    """A single problem, to be raised."""
    return DatasetProblems([Problem(path, line, text)])


class Gathering:
    """Calls readers, keeps what they complain of, and goes on."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, reader: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the reader gives. When it finds problems they are kept, and None is given in its place: use it only
        after `finish`, or ask first."""
        try:
            return reader(*args, **kwargs)
        except DatasetProblems as found:
            self.problems.extend(found.problems)
            return None  # type: ignore[return-value]

    def finish(self, heading: str = "", root: Path | None = None) -> None:
        """Raise everything that was found.

        Raises:
            DatasetProblems: something was.
        """
        if self.problems:
            raise DatasetProblems(self.problems, heading, root)
