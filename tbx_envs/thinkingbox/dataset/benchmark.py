"""Identifies the benchmark's tasks: `benchmark.lock` has three keys of each, and not the tasks themselves.

    sandbox_consulting_group1.py:test_a 1f0c... 77ab...

A task belongs to the benchmark when any key matches: the uid; the content key
(`tbx_envs.thinkingbox.dataset.records.content_key`), which a renamed copy keeps; or the words key, a hash of the user's
text alone, which a copy with a changed world or grading keeps. The published data has 30 tasks of the last kind beside
the 507: the same requests without their rubrics.
`python -m tbx_envs.thinkingbox.dataset.guard lock` writes the file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from importlib import resources

from tbx_envs.errors import DomainError
from tbx_envs.thinkingbox.dataset.records import DatasetTask, content_key

RELEASE = "thinkingbox_bench_v1"
FILE_NAME = "benchmark.lock"


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkKeys:
    """Keys of the benchmark's tasks.

    Attributes:
        uids: task ids.
        contents: content keys.
        words: words keys.
    """

    uids: frozenset[str]
    contents: frozenset[str]
    words: frozenset[str]

    def has(self, task: DatasetTask) -> bool:
        """True when the task is one of the benchmark's, or a copy of one."""
        return task.uid in self.uids or words_key(task) in self.words or content_key(task) in self.contents


def words_key(task: DatasetTask) -> str:
    """SHA-256 (hex) of what the user says and knows, ignoring spaces and case."""
    words = [" ".join(text.split()).lower() for text in (task.query, task.user_context or "")]
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def benchmark_keys() -> BenchmarkKeys:
    """The keys in the lock file that ships with the package."""
    file = resources.files("tbx_envs.thinkingbox.dataset") / FILE_NAME
    return parse_lock(file.read_text(encoding="utf-8"))


def parse_lock(text: str) -> BenchmarkKeys:
    """The keys in a lock file's text.

    Raises:
        DomainError: a line is neither a comment nor a uid with two keys.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            continue
        row = line.split()
        if len(row) != 3 or {len(key) for key in row[1:]} != {64}:
            raise DomainError(
                f"{FILE_NAME} line {number}: wanted '<uid> <content key> <words key>', found {line!r}. Write it again "
                f"with python -m tbx_envs.thinkingbox.dataset.guard lock <checkout>."
            )
        rows.append(row)
    uids, contents, words = zip(*rows, strict=True) if rows else ((), (), ())
    return BenchmarkKeys(frozenset(uids), frozenset(contents), frozenset(words))


def lock_text(tasks: Iterable[DatasetTask]) -> str:
    """The text of a lock file for these tasks."""
    head = (
        f"# Tasks of {RELEASE}, which are for evaluation only: uid, content key, words key.\n"
        f"# Written by python -m tbx_envs.thinkingbox.dataset.guard lock <checkout>.\n"
    )
    return head + "".join(f"{task.uid} {content_key(task)} {words_key(task)}\n" for task in tasks)
