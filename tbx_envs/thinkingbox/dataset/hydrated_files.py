"""JSONL files of hydrated test cases: each line is a test together with what its other files contain.

The original's `dump-tests` writes them. Such a file is a dataset by itself, without a folder; its tests are those of
the folder that it was written from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tbx_envs.thinkingbox.dataset.names import split_name
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Problem, ProblemCollector, problem
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, read_text

if TYPE_CHECKING:
    from tbx_envs.thinkingbox.dataset.records import DatasetTask

# Keys that the original adds to a test case's metadata.
_NOTES = {"scenario", "agent", "test_case_file", "test_case_name", "repetition"}


class HydratedFile:
    """The tasks of a JSONL file, listed by name without validating them.

    Args:
        path: path of the file, which is read once.
        dataset: dataset name, for its tasks.

    Attributes:
        uids: ids of the tests, in order.
        problems: errors because of which tests cannot be listed.
    """

    def __init__(self, path: Path, *, dataset: str) -> None:
        self._path, self._dataset = path, dataset
        self._lines: dict[str, tuple[int, str]] = {}
        collector = ProblemCollector()
        text = collector.attempt(read_text, path) or ""
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                collector.attempt(self._add, number, line)
        self.uids: tuple[str, ...] = tuple(self._lines)
        self.problems = tuple(collector.problems)

    def task(self, uid: str) -> DatasetTask:
        """A task of `uids`.

        Raises:
            DatasetProblems: the task cannot be built; has all errors in its line.
        """
        from tbx_envs.thinkingbox.dataset.assembly import Parts, assemble
        from tbx_envs.thinkingbox.dataset.file_records import HydratedTest, validated
        from tbx_envs.thinkingbox.dataset.history import messages_of
        from tbx_envs.thinkingbox.dataset.tags import parse_tags

        number, line = self._lines[uid]
        source = YamlText(self._path, "", number)  # the JSON is on one line, which is the line of every problem
        test = validated(HydratedTest, json.loads(line), source)
        notes = test.metadata
        try:
            return assemble(
                Parts(
                    dataset=self._dataset,
                    uid=uid,
                    path=self._path.name,
                    line=number,
                    fields=test.model_copy(
                        update={"metadata": {key: value for key, value in notes.items() if key not in _NOTES}}
                    ),
                    test_code=test.test_code,
                    scenario_name=str(notes.get("scenario", "")),
                    scenario=test.scenario,
                    agent_name=str(notes.get("agent", "")),
                    agent=test.agent,
                    tags=parse_tags(test.tags),
                    fixtures=test.fixtures,
                    history=messages_of(test.history or [], source),
                )
            )
        except ValueError as error:
            found = [Problem(self._path, number, text) for text in str(error).splitlines()]
            raise DatasetProblems(found, f"task {uid} of dataset '{self._dataset}'", self._path.parent) from error

    def _add(self, number: int, line: str) -> None:
        try:
            case = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise problem(self._path, number, f"this is not JSON: {error}") from error
        uid = case.get("uid") if isinstance(case, dict) else None
        if not isinstance(uid, str) or split_name(uid) is None:
            raise problem(self._path, number, f"wanted an object with a uid such as file.py:test, found {line[:60]!r}")
        if uid in self._lines:
            first = self._lines[uid][0]
            raise problem(self._path, number, f"{uid} is already at line {first}; remove one of them")
        self._lines[uid] = (number, line)
