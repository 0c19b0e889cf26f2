"""`Dataset`: a checkout, folder or file of tasks with its servers and test lists. Tasks are built on first access."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tbx_envs.errors import ConfigError, DomainError, did_you_mean
from tbx_envs.registration import env_id
from tbx_envs.thinkingbox.dataset.folder import DatasetFolder
from tbx_envs.thinkingbox.dataset.hydrated_files import HydratedFile
from tbx_envs.thinkingbox.dataset.names import line_of_name, read_test_list, release_lists, split_name, uid_of_name
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Problem, ProblemCollector, problem

if TYPE_CHECKING:
    from tbx_envs.thinkingbox.dataset.records import DatasetTask

# Environment variable with the default interpreter of a dataset's servers.
SERVERS_PYTHON = "TBX_SERVERS_PYTHON"


class Dataset:
    """Tasks in the layout of ThinkingBox.

    Args:
        path: a checkout (with `dataset/`, and perhaps `servers/` and `releases/`), its `dataset` folder, or a JSONL
            file of hydrated test cases.
        servers_python: interpreter of the servers; None takes `TBX_SERVERS_PYTHON`, else this one.
        test_list: tests to include: the name of a release's list, a YAML file, or names; None includes all.
        servers: the servers' file; None takes `servers/servers.yaml` of the checkout.
        name: dataset name; None takes the folder's.
        agent: agent name; None takes `think`, or the only one there is.

    Attributes:
        name: dataset name, with which `tasks=` selects all of its tasks.
        root: folder of its files.
        servers_file: the servers' file; None when there is none, and tasks can be read but not run.
        servers_python: interpreter of the servers.
        lists: name -> file of each release's test list.

    Raises:
        DomainError: there is no dataset at `path`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        servers_python: str | os.PathLike[str] | None = None,
        test_list: str | os.PathLike[str] | Sequence[str] | None = None,
        servers: str | os.PathLike[str] | None = None,
        name: str | None = None,
        agent: str | None = None,
    ) -> None:
        place = Path(path).expanduser().resolve()
        checkout, self.root = _parts_of(place)
        self.name = name or (checkout.stem if place.is_file() else checkout.name)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise DomainError(
                f"'{self.name}' cannot name a dataset: letters, digits, '_', '.' and '-' can. Give name=."
            )
        self.servers_python = os.fspath(servers_python or os.environ.get(SERVERS_PYTHON) or sys.executable)
        usual = checkout / "servers" / "servers.yaml"
        self.servers_file = Path(servers).expanduser() if servers else usual if usual.is_file() else None
        self.lists: Mapping[str, Path] = release_lists(checkout / "releases")
        self._tasks: dict[str, DatasetTask] = {}
        self._files = self._tests_of(place, test_list, agent)

    def uids(self, split: str | None = None) -> tuple[str, ...]:
        """Ids of the tasks of one split, or of both. With a split, all tasks are built to know theirs.

        Raises:
            DatasetProblems: a split is given, and a task cannot be built.
        """
        if split is None:
            return self._files.uids
        return tuple(uid for uid in self._files.uids if self.task(uid).split == split)

    def task(self, uid: str) -> DatasetTask:
        """The task with that uid, built once.

        Raises:
            DomainError: there is no such task.
            DatasetProblems: the task cannot be built; has all errors in its files.
        """
        if uid not in self._tasks:
            if uid not in self._files.uids:
                near = did_you_mean(uid, self._files.uids)
                raise DomainError(f"unknown task '{uid}' in dataset '{self.name}' ({self.root}).{near}")
            self._tasks[uid] = self._files.task(uid)
        return self._tasks[uid]

    def list_uids(self, name: str) -> tuple[str, ...]:
        """The uids in a release's test list, in its order.

        Raises:
            DomainError: there is no such list.
            DatasetProblems: names in the list are not tasks.
        """
        if name not in self.lists:
            near = did_you_mean(name, self.lists)
            raise DomainError(
                f"dataset '{self.name}' has no list '{name}'.{near} It has {', '.join(self.lists) or 'none'}."
            )
        path = self.lists[name]
        uids = [uid_of_name(given) for given in read_test_list(path)]
        known = set(self._files.uids)
        wrong = [Problem(path, line_of_name(path, uid), _unknown(uid, known)) for uid in uids if uid not in known]
        if wrong:
            raise DatasetProblems(wrong, f"list '{name}' of dataset '{self.name}'", self.root.parent)
        return tuple(uids)

    def refuse_unreadable(self) -> None:
        """Check that all tests can be listed.

        Raises:
            DatasetProblems: files cannot be read, or names do not lead to a test.
        """
        if problems := [*self._files.problems, *self._without_ids()]:
            raise DatasetProblems(problems, self._heading, self.root.parent)

    def validate(self) -> None:
        """Build every task and read every list.

        Raises:
            DatasetProblems: some cannot be built or read; has all errors in all files.
        """
        collector = ProblemCollector()
        collector.attempt(self.refuse_unreadable)
        for uid in self._files.uids:
            collector.attempt(self.task, uid)
        for name in self.lists:
            collector.attempt(self.list_uids, name)
        collector.finish(self._heading, self.root.parent)

    @property
    def _heading(self) -> str:
        return f"dataset '{self.name}' in {self.root.parent}"

    def _tests_of(
        self, place: Path, test_list: str | os.PathLike[str] | Sequence[str] | None, agent: str | None
    ) -> DatasetFolder | HydratedFile:
        if place.is_file():
            if test_list is not None or agent is not None:
                raise ConfigError(f"{place} contains its tests and agents; leave test_list and agent out.")
            return HydratedFile(place, dataset=self.name)
        path: Path | None
        match test_list:
            case None:
                return DatasetFolder(self.root, dataset=self.name, agent=agent)
            case str() | os.PathLike():
                path = self.lists.get(os.fspath(test_list)) or Path(test_list).expanduser()
                names = read_test_list(path)
            case _:
                path, names = None, tuple(test_list)
        return DatasetFolder(self.root, dataset=self.name, agent=agent, names=names, names_from=path)

    def _without_ids(self) -> list[Problem]:
        """Problems of tests that share a Gymnasium id, which can contain only letters, digits and `_.-`."""
        of_id: dict[str, str] = {}
        problems = []
        for uid in self._files.uids:
            other = of_id.setdefault(env_id(uid), uid)
            if other != uid:
                text = f"tests {other} and {uid} would have the same id, {env_id(uid)}; rename one"
                problems.append(problem(self.root, None, text).problems[0])
        return problems


def _parts_of(place: Path) -> tuple[Path, Path]:
    """The checkout, and the folder of the tests in it.

    Raises:
        DomainError: `place` is neither a checkout nor a dataset folder nor a JSONL file.
    """
    if place.is_file() and place.suffix == ".jsonl":
        return place, place.parent
    if (place / "dataset" / "test_case").is_dir():
        return place, place / "dataset"
    if (place / "test_case").is_dir():
        return (place.parent, place) if place.name == "dataset" else (place, place)
    found = "it has no dataset/test_case and no test_case folder" if place.is_dir() else "there is no such folder"
    raise DomainError(
        f"no dataset at {place}: {found}. Give a checkout of ThinkingBox data (dataset/, servers/, releases/), its "
        f"dataset folder (agent/, scenario/, test_case/), or a JSONL file of hydrated test cases."
    )


def _unknown(uid: str, known: set[str]) -> str:
    if split_name(uid) is None:
        return f"'{uid}' is not the name of a test; write file.py:test"
    return f"'{uid}': there is no such task, or it is tagged skip.{did_you_mean(uid, known)}"
