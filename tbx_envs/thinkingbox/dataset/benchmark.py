"""Identifies the benchmark's tasks: `benchmark.lock` has three keys of each, and not the tasks themselves.

    sandbox_consulting_group1.py:test_a 1f0c... 77ab... 04d9...

A task belongs to the benchmark when its uid or any one of its keys does, whatever else was changed: the key of what
the user says, that of the rows that are patched into the servers' data, and that of the expected calls. Over the
benchmark each of the last two is unique, and no key is shared with another task of the published data but 30 that are
the benchmark's own without their rubrics. The user's context is no key: a hundred tasks share theirs.

Keys are hashes of normalised values (`normalised`), so that case, marks, typographic and invisible characters, the
order of keys and rows, and keys without a value change nothing.
`python -m tbx_envs.thinkingbox.dataset.guard lock` writes the file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from tbx_envs.errors import DomainError
from tbx_envs.messages import Text
from tbx_envs.thinkingbox.dataset.records import DatasetTask

RELEASE = "thinkingbox_bench_v1"
FILE_NAME = "benchmark.lock"
PATCH = "data_patch"  # key of a server's configuration: the rows that the task adds to the server's data
_NO_KEY = "-"  # in the file, of a task that lacks this part


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkKeys:
    """Keys of the benchmark's tasks.

    Attributes:
        uids: task ids.
        queries: keys of the users' first messages.
        patches: keys of the servers' patched rows.
        calls: keys of the expected calls.
    """

    uids: frozenset[str]
    queries: frozenset[str]
    patches: frozenset[str]
    calls: frozenset[str]

    def has(self, task: DatasetTask) -> bool:
        """True when the task is one of the benchmark's, or a copy of one."""
        return (
            task.uid in self.uids
            or any(text_key(text) in self.queries for text in _texts(task))
            or any(patch_key(config) in self.patches for config in task.init.values())
            or calls_key(task) in self.calls
        )


def _texts(task: DatasetTask) -> Iterable[str]:
    """What the user says or knows: a copy may have moved the request into the messages before the query."""
    yield task.query
    yield task.user_context or ""
    yield from (message.text for message in task.history if isinstance(message, Text) and message.role == "user")


def text_key(text: str) -> str | None:
    """The key of what a user says; None when it has no letter or digit."""
    return _hash(normalised(text))


def patch_key(config: Any) -> str | None:
    """The key of the rows that a server's configuration patches into its data; None when there are none."""
    return _hash(normalised(config.get(PATCH))) if isinstance(config, Mapping) else None


def calls_key(task: DatasetTask) -> str | None:
    """The key of the expected calls, in any order; None when there are none."""
    return _hash(normalised([[call.tool, call.arguments] for call in task.expected_calls]))


def normalised(value: Any) -> Any:
    """A value without what a copy can change and still be the same.

    Text is lower-cased letters and digits in their plain form, numbers are text, mappings and lists are sorted, and
    entries that are empty are left out. Whatever has no content is None.

    >>> normalised({"b": ["\\u201cTwo\\u201d \\u200bBikes!", None], "a": 1.0})
    [['a', '1'], ['b', ['twobikes']]]
    """
    match value:
        case None:
            return None
        case bool():
            return str(value).lower()
        case float() if value.is_integer():
            return str(int(value))
        case str():
            return _plain(value) or None
        case Mapping():
            pairs = ([_plain(str(key)), normalised(part)] for key, part in value.items())
            return _sorted(pair for pair in pairs if pair[1] is not None)
        case Sequence():
            return _sorted(part for part in map(normalised, value) if part is not None)
        case _:
            return _plain(str(value))


def _plain(text: str) -> str:
    """Lower-case letters and digits only, decomposed: accents, marks and invisible characters are no letters."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return re.sub(r"[\W_]+", "", text.casefold())


def _sorted(parts: Iterable[Any]) -> list[Any] | None:
    return sorted(parts, key=json.dumps) or None


def _hash(value: Any) -> str | None:
    """SHA-256 (hex) of a normalised value; None of None."""
    return None if value is None else hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()


@functools.cache
def benchmark_keys() -> BenchmarkKeys:
    """The keys in the lock file that ships with the package."""
    file = resources.files("tbx_envs.thinkingbox.dataset") / FILE_NAME
    return parse_lock(file.read_text(encoding="utf-8"))


def parse_lock(text: str) -> BenchmarkKeys:
    """The keys in a lock file's text.

    Raises:
        DomainError: a line is neither a comment nor a uid with three keys.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            continue
        row = line.split()
        if len(row) != 4 or not all(key == _NO_KEY or len(key) == 64 for key in row[1:]):
            raise DomainError(
                f"{FILE_NAME} line {number}: wanted '<uid> <query key> <patch key> <calls key>', found {line!r}. Write "
                f"it again with python -m tbx_envs.thinkingbox.dataset.guard lock <checkout>."
            )
        rows.append(row)
    columns = zip(*rows, strict=True) if rows else ((),) * 4
    uids, queries, patches, calls = (frozenset(column) - {_NO_KEY} for column in columns)
    return BenchmarkKeys(uids, queries, patches, calls)


def lock_text(tasks: Iterable[DatasetTask]) -> str:
    """The text of a lock file for these tasks.

    Raises:
        DomainError: a task patches the data of several servers, for which a line has no room.
    """
    head = (
        f"# Tasks of {RELEASE}, which are for evaluation only: uid, and keys of query, data patch and expected calls.\n"
        f"# Written by python -m tbx_envs.thinkingbox.dataset.guard lock <checkout>.\n"
    )
    return head + "".join(f"{_line(task)}\n" for task in tasks)


def _line(task: DatasetTask) -> str:
    patches = [key for config in task.init.values() if (key := patch_key(config)) is not None]
    if len(patches) > 1:
        raise DomainError(f"task {task.uid}: {len(patches)} servers have a {PATCH}; a line of {FILE_NAME} has one key.")
    keys = (text_key(task.query), patches[0] if patches else None, calls_key(task))
    return " ".join([task.uid, *(key or _NO_KEY for key in keys)])
