"""Datasets in the layout of ThinkingBox, read without conversion; each task gets a Gymnasium id.

`register_dataset` registers a dataset's tasks in this process and in those that it starts afterwards, such as spawned
workers: they find it in an environment variable that this module alone writes, and register it when they import
tbx_envs. `TBX_DATASETS` (paths, colon-separated) does so in every process. A uid of a dataset has exactly one colon
(`file.py:test`), a built-in one has none.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tbx_envs.errors import DomainError, TbxError, did_you_mean
from tbx_envs.handed_down import hide_environment
from tbx_envs.registration import BUILT_IN, register_uids, unregister_uids
from tbx_envs.thinkingbox.dataset.dataset import Dataset

DATASETS = "TBX_DATASETS"
# What `register_dataset` was given, for processes that this one starts: a JSON list of its arguments.
REGISTERED = "TBX_REGISTERED_DATASETS"
# Words with another meaning in `tasks=`.
RESERVED = ("all", "train", "heldout", "datasets", *BUILT_IN)

_registered: dict[str, Dataset] = {}
_owners: dict[str, Dataset] = {}
_broken: dict[str, TbxError] = {}
_given: dict[str, dict[str, Any]] = {}


def is_dataset_uid(uid: str) -> bool:
    """True for the uid of a dataset's task, registered or not."""
    return ":" in uid


def register_dataset(
    path: str | os.PathLike[str],
    *,
    servers_python: str | os.PathLike[str] | None = None,
    test_list: str | os.PathLike[str] | Sequence[str] | None = None,
    servers: str | os.PathLike[str] | None = None,
    name: str | None = None,
    agent: str | None = None,
) -> Dataset:
    """Register the tasks of a dataset, each as `ThinkingBox/<file.py>.<test>-v0`, here and in processes started later.

    Registering a dataset again reads its files again. Arguments are those of
    `tbx_envs.thinkingbox.dataset.dataset.Dataset`.

    Raises:
        DomainError: there is no dataset, its tests cannot be listed, or another dataset has its name or some of its
            uids.
    """
    hide_environment()  # here too: its programs may be started by workers of this process, which can read its block
    options = {"servers_python": servers_python, "test_list": test_list, "servers": servers, "name": name}
    dataset = _register(path, **options, agent=agent)
    _given[dataset.name] = {"path": os.path.abspath(os.path.expanduser(path)), **options, "agent": agent}
    told = [given for known, given in _given.items() if known in _registered]
    os.environ[REGISTERED] = json.dumps(told, default=_plain)
    return dataset


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else list(value)


def _register(path: str | os.PathLike[str], **options: Any) -> Dataset:
    dataset = Dataset(path, **options)
    dataset.refuse_unreadable()
    if dataset.name in RESERVED:
        raise DomainError(f"a dataset cannot be named '{dataset.name}', which means other tasks; give it a name=.")
    before = _registered.get(dataset.name)
    if before is not None and before.root != dataset.root:
        raise DomainError(
            f"two datasets have the name '{dataset.name}': {before.root} is registered, and {dataset.root} would be. "
            f"Give one of them a name=."
        )
    shared = [uid for uid in dataset.uids() if _owners.get(uid, before) is not before]
    if shared:
        other = _owners[shared[0]]
        raise DomainError(
            f"datasets '{other.name}' ({other.root}) and '{dataset.name}' ({dataset.root}) both have {shared[0]}"
            f"{f' and {len(shared) - 1} more of the same uids' if len(shared) > 1 else ''}. Register one of them, or "
            f"give test_list= the tests that only it has."
        )
    if before is not None:
        _forget(before)
    _registered[dataset.name] = dataset
    _owners.update(dict.fromkeys(dataset.uids(), dataset))
    register_uids(dataset.uids())
    return dataset


def registered_datasets() -> tuple[Dataset, ...]:
    """The datasets registered in this process, in order of registration."""
    return tuple(_registered.values())


def dataset_of(uid: str) -> Dataset:
    """The dataset that has a task.

    Raises:
        DomainError: no registered dataset has it.
    """
    if uid in _owners:
        return _owners[uid]
    refuse_broken()
    if not _registered:
        raise DomainError(
            f"unknown task '{uid}': no dataset is registered. Set {DATASETS} to its path, or call "
            f"tbx_envs.register_dataset."
        )
    known = ", ".join(f"'{dataset.name}' ({len(dataset.uids())} tasks)" for dataset in _registered.values())
    raise DomainError(f"unknown task '{uid}'.{did_you_mean(uid, _owners)} Registered: {known}.")


def register_from_environment(environ: Mapping[str, str] | None = None) -> None:
    """Register the datasets in `TBX_DATASETS`, and those that a process which started this one has registered.

    One that fails gives a warning here, and an error when it is used.
    """
    environ = os.environ if environ is None else environ
    wanted = {given: {"path": given.strip()} for given in environ.get(DATASETS, "").split(os.pathsep) if given.strip()}
    inherited = {options["path"]: options for options in json.loads(environ.get(REGISTERED) or "[]")}
    for given, options in (wanted | inherited).items():
        try:
            dataset = _register(**options)
            if given in inherited:
                _given[dataset.name] = options
        except TbxError as error:
            _broken[given] = error
            first, *rest = str(error).splitlines()
            more = f" {rest[0].strip()}{' ...' if len(rest) > 1 else ''}" if rest else ""
            warnings.warn(
                f"{DATASETS}: {given} is not registered: {first}{more}", category=RuntimeWarning, stacklevel=2
            )


def refuse_broken() -> None:
    """Check that all paths of `TBX_DATASETS` were registered.

    Raises:
        DomainError: some were not; the message has the reasons.
    """
    if _broken:
        said = "\n".join(f"{given}: {error}" for given, error in _broken.items())
        raise DomainError(f"{DATASETS} has paths that could not be registered:\n{said}")


def _forget(dataset: Dataset) -> None:
    unregister_uids(dataset.uids())
    for uid in dataset.uids():
        _owners.pop(uid, None)
    _registered.pop(dataset.name, None)


__all__ = [
    "Dataset",
    "dataset_of",
    "is_dataset_uid",
    "refuse_broken",
    "register_dataset",
    "register_from_environment",
    "registered_datasets",
]
