"""The tests of a dataset's folder, known by name without reading any YAML:

    agent/<name>.yaml        how the agent is instructed, and tools of its own
    scenario/<name>.yaml     servers, their world, the tools that are offered
    test_case/**/*.py        tests; *.yaml likewise, `conftest.yaml` (fixtures) and `*.meta.yaml` (history) aside
    tag_taxonomy.yaml        optional: which tags there are

What a process has read stays as it was; registering the dataset again reads it anew.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tbx_envs.errors import did_you_mean
from tbx_envs.thinkingbox.dataset.names import find_test_file, line_of_name, split_name, test_files_in
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Gathering, problem
from tbx_envs.thinkingbox.dataset.test_files import TestFile, read_test_file

if TYPE_CHECKING:
    from tbx_envs.thinkingbox.dataset.hydrate import Hydrator
    from tbx_envs.thinkingbox.dataset.records import DatasetTask


class DatasetFolder:
    """The tests of a folder, or those that a list names.

    Args:
        root: the folder with `scenario`, `agent` and `test_case`.
        dataset: name of the dataset, for its tasks.
        agent: name of the agent; None takes `think`, or the only one there is.
        names: the tests to know, `file.py:test`; None knows all.
        names_from: the file of the names, for messages.

    Attributes:
        uids: of the tests, in the order of files and tests, or of the names.
        problems: what keeps tests from being known.
    """

    def __init__(
        self,
        root: Path,
        *,
        dataset: str,
        agent: str | None = None,
        names: Sequence[str] | None = None,
        names_from: Path | None = None,
    ) -> None:
        self._dataset, self._agent = dataset, agent
        self._root, self._test_cases = root, root / "test_case"
        self._names_from = names_from or self._test_cases
        self._files: dict[Path, TestFile] = {}
        self._led_to: dict[str, Path | None] = {}
        self._tests: dict[str, tuple[TestFile, str]] = {}
        gathering = Gathering()
        if not self._test_cases.is_dir():
            gathering.problems.append(problem(self._test_cases, None, "there is no such folder").problems[0])
        for path in test_files_in(self._test_cases) if names is None else ():
            gathering.attempt(self._add_all, path)
        for name in names or ():
            gathering.attempt(self._add_named, name)
        self.uids: tuple[str, ...] = tuple(self._tests)
        self.problems = tuple(gathering.problems)

    def task(self, uid: str) -> DatasetTask:
        """A task of `uids`.

        Raises:
            DatasetProblems: everything in its files that keeps it from being built.
        """
        return self._hydrator.task(uid, *self._tests[uid])

    @functools.cached_property
    def _hydrator(self) -> Hydrator:
        from tbx_envs.thinkingbox.dataset.hydrate import Hydrator  # not needed to know names, and slow to import

        return Hydrator(self._root, self._dataset, self._agent)

    def _add_all(self, path: Path) -> None:
        file = self._file(path)
        for name in file.names:
            self._add(file, name)

    def _add_named(self, given: str) -> None:
        parts = split_name(given)
        if parts is None:
            raise self._refused(given, "is no name of a test; write file.py:test")
        path = self._path_of(parts[0])
        if path is None:
            near = did_you_mean(parts[0], [path.name for path in test_files_in(self._test_cases)])
            raise self._refused(given, f"is in no file: there is no '{parts[0]}' where it belongs.{near}")
        file = self._file(path)
        if parts[1] not in file.names:
            near = did_you_mean(parts[1], file.names)
            raise self._refused(given, f"is no test: {path.name} has no '{parts[1]}', or tags it skip.{near}")
        self._add(file, parts[1])

    def _refused(self, name: str, said: str) -> DatasetProblems:
        """A problem of a listed name, told with the line of the list."""
        return problem(self._names_from, line_of_name(self._names_from, name), f"'{name}' {said}")

    def _add(self, file: TestFile, name: str) -> None:
        """Of two files with one name, the one that the name leads to has the uid."""
        uid = f"{file.path.name}:{name}"
        other = self._tests.get(uid, (file, ""))[0].path
        if other == file.path or self._path_of(file.path.name) == file.path:
            self._tests[uid] = (file, name)
        elif self._path_of(file.path.name) != other:
            where = other.relative_to(self._root)
            raise problem(
                file.path, None, f"test '{name}' would be {uid}, as one in {where} is; rename one of the files"
            )

    def _path_of(self, name: str) -> Path | None:
        if name not in self._led_to:
            self._led_to[name] = find_test_file(self._test_cases, name)
        return self._led_to[name]

    def _file(self, path: Path) -> TestFile:
        if path not in self._files:
            self._files[path] = read_test_file(path)
        return self._files[path]
