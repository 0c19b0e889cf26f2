"""The source of a task, by its uid.

A uid of a ThinkingBox dataset has exactly one colon (`file.py:test`), one of our own domains has none
(`clinic/cancel_visit/007`). Only this module reads the kind of a task off its uid.
"""

from __future__ import annotations

from tbx_envs.domains import NAMES, load_domain
from tbx_envs.domains.runtime import DomainSource
from tbx_envs.errors import DomainError, did_you_mean
from tbx_envs.runtime import TaskSource
from tbx_envs.task import AnyTask


def source_of(uid: str) -> TaskSource:
    """The source that a task's uid belongs to.

    Raises:
        DomainError: no domain has that name.
    """
    if ":" in uid:
        from tbx_envs.thinkingbox.runtime import DatasetSource  # only processes that run a dataset's tasks need it

        return DatasetSource()
    try:
        return DomainSource(load_domain(uid.partition("/")[0]))
    except DomainError as error:
        frozen = (known for name in NAMES for known in load_domain(name).uids())
        raise DomainError(f"unknown task '{uid}': {error}{did_you_mean(uid, frozen)}") from error


def find_task(uid: str) -> AnyTask:
    """The task of that uid.

    Raises:
        DomainError: no such domain, family or test, or the files of a dataset are wrong.
    """
    return source_of(uid).task(uid)


def task_hash(uid: str) -> str:
    """SHA-256 (hex) over a task and all texts of its source that an agent reads (`TaskSource.task_hash`)."""
    source = source_of(uid)
    return source.task_hash(source.task(uid))


def is_heldout_family(task: AnyTask) -> bool:
    """True when no task of the task's family is in the `train` split, as with every task of the benchmark."""
    return source_of(task.uid).is_heldout_family(task)
