"""The tests of a dataset's folder, listed by name without reading any YAML:

    agent/<name>.yaml        instructions of the agent, and its own tools
    scenario/<name>.yaml     servers, their world, the tools that are offered
    test_case/**/*.py        tests; also *.yaml, except `conftest.yaml` (fixtures) and `*.meta.yaml` (history)
    tag_taxonomy.yaml        optional: the tags that exist

Files are read once per process; registering the dataset again reads them again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tbx_envs.errors import did_you_mean
from tbx_envs.thinkingbox.dataset.names import find_test_file, line_of_name, split_name, test_files_in
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, ProblemCollector, problem
from tbx_envs.thinkingbox.dataset.test_files import TestFile, read_test_file

if TYPE_CHECKING:
    from tbx_envs.thinkingbox.dataset.hydrate import Hydrator
    from tbx_envs.thinkingbox.dataset.records import DatasetTask


class DatasetFolder:
    """The tests of a folder, or those that a list names.

    Args:
        root: folder with `scenario`, `agent` and `test_case`.
        dataset: dataset name, for its tasks.
        agent: agent name; None takes `think`, or the only one there is.
        names: tests to include, as `file.py:test`; None includes all.
        names_from: file of the names, for messages.

    Attributes:
        uids: ids of the tests, in the order of files and tests, or of the names.
        problems: errors because of which tests cannot be listed.
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
        collector = ProblemCollector()
        if not self._test_cases.is_dir():
            collector.problems.append(problem(self._test_cases, None, "there is no such folder").problems[0])
        for path in test_files_in(self._test_cases) if names is None else ():
            collector.attempt(self._add_all, path)
        for name in names or ():
            collector.attempt(self._add_named, name)
        self.uids: tuple[str, ...] = tuple(self._tests)
        self.problems = tuple(collector.problems)

    def task(self, uid: str) -> DatasetTask:
        """A task of `uids`.

        Raises:
            DatasetProblems: the task cannot be built; has all errors in its files.
        """
        return self._hydrator.task(uid, *self._tests[uid])

    @functools.cached_property
    def _hydrator(self) -> Hydrator:
        from tbx_envs.thinkingbox.dataset.hydrate import Hydrator  # slow to import, and not needed to list names

        return Hydrator(self._root, self._dataset, self._agent)

    def _add_all(self, path: Path) -> None:
        file = self._file(path)
        for name in file.names:
            self._add(file, name)

    def _add_named(self, given: str) -> None:
        parts = split_name(given)
        if parts is None:
            raise self._name_problem(given, "is not the name of a test; write file.py:test")
        path = self._path_of(parts[0])
        if path is None:
            near = did_you_mean(parts[0], [path.name for path in test_files_in(self._test_cases)])
            raise self._name_problem(given, f"is in no file: there is no '{parts[0]}' in its place.{near}")
        file = self._file(path)
        if parts[1] not in file.names:
            near = did_you_mean(parts[1], file.names)
            raise self._name_problem(given, f"is not a test: {path.name} has no '{parts[1]}', or tags it skip.{near}")
        self._add(file, parts[1])

    def _name_problem(self, name: str, text: str) -> DatasetProblems:
        """A problem of a name, with its line in the list."""
        return problem(self._names_from, line_of_name(self._names_from, name), f"'{name}' {text}")

    def _add(self, file: TestFile, name: str) -> None:
        """Add a test. When two files have the same name, the file that the name leads to gets the uid."""
        uid = f"{file.path.name}:{name}"
        other = self._tests.get(uid, (file, ""))[0].path
        if other == file.path or self._path_of(file.path.name) == file.path:
            self._tests[uid] = (file, name)
        elif self._path_of(file.path.name) != other:
            where = other.relative_to(self._root)
            raise problem(
                file.path, None, f"test '{name}' would be {uid}, like one in {where}; rename one of the files"
            )

    def _path_of(self, name: str) -> Path | None:
        if name not in self._led_to:
            self._led_to[name] = find_test_file(self._test_cases, name)
        return self._led_to[name]

    def _file(self, path: Path) -> TestFile:
        if path not in self._files:
            self._files[path] = read_test_file(path)
        return self._files[path]
