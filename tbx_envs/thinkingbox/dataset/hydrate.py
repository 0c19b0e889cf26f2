"""Builds a task from a test: finds, reads and adds its scenario, agent, fixtures and history.

Each file is read once; the errors in all files of a task are reported together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tbx_envs.errors import did_you_mean
from tbx_envs.messages import Message
from tbx_envs.thinkingbox.dataset.assembly import Parts, assemble
from tbx_envs.thinkingbox.dataset.file_records import (
    AgentFields,
    ConftestFields,
    Fields,
    FixtureFields,
    ScenarioFields,
    TaxonomyFields,
    TestFields,
    YamlTest,
    validated,
)
from tbx_envs.thinkingbox.dataset.history import load_history, meta_file_of
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Problem, ProblemCollector, problem
from tbx_envs.thinkingbox.dataset.records import DatasetTask
from tbx_envs.thinkingbox.dataset.tags import Tags, merge_tags, parse_tags, unknown_values
from tbx_envs.thinkingbox.dataset.test_files import RawTest, TestFile
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_mapping, load_yaml, read_text

DEFAULT_AGENT = "think"
TAXONOMY = "tag_taxonomy.yaml"

R = TypeVar("R")
F = TypeVar("F", bound=Fields)


class Hydrator:
    """Builds the tasks of one dataset.

    Args:
        root: folder with `scenario`, `agent` and `test_case`.
        dataset: dataset name, for the tasks.
        agent: agent name; None takes `think`, or the only one there is.
    """

    def __init__(self, root: Path, dataset: str, agent: str | None) -> None:
        self._root = root
        self._dataset = dataset
        self._agent_asked = agent
        self._read: dict[Path, Any] = {}
        self._scenarios = _names_in(root / "scenario")

    def task(self, uid: str, file: TestFile, name: str) -> DatasetTask:
        """The task of one test of a file.

        Raises:
            DatasetProblems: the task cannot be built; has all errors in its files.
        """
        parts = self._parts(uid, file, name)
        try:
            return assemble(parts)
        except ValueError as error:
            found = [Problem(file.path, parts.line, text) for text in str(error).splitlines()]
            raise DatasetProblems(found, self._heading(uid), self._root) from error

    def _parts(self, uid: str, file: TestFile, name: str) -> Parts:
        collector = ProblemCollector()
        agent = collector.attempt(self._agent)
        fixtures = collector.attempt(self._fixtures, file.path.parent)
        raw = collector.attempt(file.test, name)
        fields = tags = scenario = history = None
        if raw is not None:
            fields = collector.attempt(self._fields, raw)
            tags = collector.attempt(self._tags, raw.config.get("tags"), raw.source, (*raw.keys, "tags"))
            scenario = collector.attempt(self._scenario, raw)
        if raw is not None and fields is not None:
            history = collector.attempt(self._history, raw, fields)
        collector.finish(self._heading(uid), self._root)
        # `finish` raises unless every attempt succeeded.
        assert agent is not None and fixtures is not None and raw is not None and fields is not None
        assert tags is not None and scenario is not None and history is not None
        return Parts(
            dataset=self._dataset,
            uid=uid,
            path=file.path.relative_to(self._root).as_posix(),
            line=raw.line,
            fields=fields,
            test_code=raw.test_code,
            scenario_name=fields.scenario,
            scenario=scenario.fields,
            agent_name=agent.name,
            agent=agent.fields,
            tags=merge_tags(scenario.tags, tags),
            fixtures={**fixtures, **scenario.fields.fixtures},
            history=history,
        )

    def _heading(self, uid: str) -> str:
        return f"task {uid} of dataset '{self._dataset}'"

    def _fields(self, raw: RawTest) -> TestFields:
        return validated(YamlTest if raw.keys else TestFields, raw.config, raw.source, raw.keys)

    def _agent(self) -> _Agent:
        return self._once(self._root / "agent", self._read_agent)

    def _read_agent(self) -> _Agent:
        folder = self._root / "agent"
        known = _names_in(folder)
        name = self._agent_asked or (known[0] if len(known) == 1 else DEFAULT_AGENT)
        if name not in known:
            text = (
                f"there is no agent '{name}'.{did_you_mean(name, known)} There is {', '.join(known) or 'none'}. Give "
            )
            raise problem(folder, None, f"{text}register_dataset(agent=) one that is there, or add {name}.yaml")
        path = folder / f"{name}.yaml"
        return _Agent(name, _record(path, AgentFields, "an agent's file"))

    def _scenario(self, raw: RawTest) -> _Scenario:
        name = raw.config.get("scenario")
        if not isinstance(name, str):  # validating the test's fields reports it
            raise DatasetProblems([])
        if name not in (known := self._scenarios):
            text = f"there is no scenario '{name}'.{did_you_mean(name, known)} There is {', '.join(known) or 'none'}."
            raise problem(raw.source.path, raw.source.line_of([*raw.keys, "scenario"]), text)
        path = self._root / "scenario" / f"{name}.yaml"
        return self._once(path, lambda: self._read_scenario(path))

    def _read_scenario(self, path: Path) -> _Scenario:
        collector = ProblemCollector()
        source = _source(path)
        given = load_mapping(source, "a scenario")
        fields = collector.attempt(validated, ScenarioFields, given, source)
        tags = collector.attempt(self._tags, given.get("tags"), source, ("tags",))
        collector.finish()
        assert fields is not None and tags is not None  # `finish` raises otherwise
        return _Scenario(fields, tags)

    def _tags(self, given: Any, source: YamlText, keys: tuple[str | int, ...]) -> Tags:
        if given is not None and not isinstance(given, list | dict):  # validating the fields reports it
            raise DatasetProblems([])
        try:
            tags = parse_tags(given)
            wrong = unknown_values(tags, self._taxonomy())
        except ValueError as error:
            wrong = str(error).splitlines()
        if wrong:
            raise DatasetProblems(Problem(source.path, source.line_of(keys), text) for text in wrong)
        return tags

    def _taxonomy(self) -> Mapping[str, Sequence[str]]:
        """Section -> values that tags may have; a missing section allows any."""
        path = self._root / TAXONOMY
        if not path.is_file():
            return {}
        sections = self._once(path, lambda: _record(path, TaxonomyFields, "a taxonomy"))
        return {name: tuple(values.values()) for name, values in sections if values}

    def _fixtures(self, folder: Path) -> dict[str, FixtureFields]:
        """Fixtures of the `conftest.yaml` files in all folders from `test_case` to the file's; the deepest one wins."""
        top = self._root / "test_case"
        folders = [top, *reversed([above for above in (folder, *folder.parents) if above.is_relative_to(top)][:-1])]
        collector = ProblemCollector()
        fixtures: dict[str, FixtureFields] = {}
        for path in [place / "conftest.yaml" for place in folders]:
            if path.is_file():
                read = functools.partial(_conftest, path)
                fixtures |= collector.attempt(self._once, path, read) or {}
        collector.finish()
        return fixtures

    def _history(self, raw: RawTest, fields: TestFields) -> tuple[Message, ...]:
        if fields.history is None:
            return ()
        asked_at = (raw.source.path, raw.source.line_of([*raw.keys, "history"]))
        return load_history(meta_file_of(raw.source.path), fields.history, asked_at)

    def _once(self, path: Path, read: Callable[[], R]) -> R:
        if path not in self._read:
            self._read[path] = read()
        return self._read[path]


class _Agent(NamedTuple):
    name: str
    fields: AgentFields


class _Scenario(NamedTuple):
    fields: ScenarioFields
    tags: Tags


def _names_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _source(path: Path) -> YamlText:
    return YamlText(path, read_text(path))


def _record(path: Path, record: type[F], what: str) -> F:
    source = _source(path)
    return validated(record, load_mapping(source, what), source)


def _conftest(path: Path) -> dict[str, FixtureFields]:
    source = _source(path)
    if load_yaml(source) is None:  # only comments
        return {}
    return validated(ConftestFields, load_mapping(source, "a conftest.yaml"), source).fixtures
