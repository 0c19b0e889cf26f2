"""Selecting tasks: a string, as given on a command line, becomes uids."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path

from tbx_envs.domains import NAMES, load_domain
from tbx_envs.errors import ConfigError, DomainError, did_you_mean
from tbx_envs.files import read_text
from tbx_envs.sources import find_task, source_of
from tbx_envs.thinkingbox.dataset import is_dataset_uid, refuse_broken, registered_datasets
from tbx_envs.thinkingbox.dataset.names import read_test_list, repeated, uid_of_name


def all_uids(split: str | None = None) -> tuple[str, ...]:
    """Uids of the frozen tasks of all built-in domains, of one split or (None) of both; builds no task."""
    return tuple(uid for name in NAMES for uid in load_domain(name).uids(split))


def dataset_uids() -> tuple[str, ...]:
    """Uids of the tasks of all registered datasets; builds no task."""
    return tuple(uid for dataset in registered_datasets() for uid in dataset.uids())


def select_tasks(selection: str) -> tuple[str, ...]:
    """The uids that `selection` names, in canonical order or in the order of the list.

    `all`, `train` and `heldout` select from the built-in domains only, regardless of registered datasets, so that a
    command selects the same tasks everywhere. A pattern with a colon is matched against the uids of datasets, one
    without against built-in ones.

    Args:
        selection: `all`, `train`, `heldout`, a domain's name, `datasets` (all registered ones), a dataset's name, the
            name of a release's list (`thinkingbox_bench_v1`), a uid, a pattern such as `clinic/*/00?`,
            `clinic/refill/00[01]` or `shop_group1.py:*`, or a file: one uid a line (`#` starts a comment), or a YAML
            list of them.

    Raises:
        ConfigError: nothing has that name, no task matches, or a file lists a task twice or an unknown one.
        DomainError: the files of a dataset that is needed are wrong.
    """
    if selection in ("all", "train", "heldout"):
        return all_uids(None if selection == "all" else selection)
    if selection in NAMES:
        return load_domain(selection).uids()
    named = _of_datasets(selection)
    if named is not None:
        return named
    known = dataset_uids() if is_dataset_uid(selection) else all_uids()
    if selection not in known and any(mark in selection for mark in "*?["):
        matching = tuple(fnmatch.filter(known, selection))
        if not matching:
            refuse_broken()
            such = f", such as '{known[0]}'" if known else ""
            raise ConfigError(f"no task matches '{selection}'. {len(known)} tasks are known{such}.")
        return matching
    if selection in known:
        return (selection,)
    if Path(selection).is_file():
        return _from_file(Path(selection))
    try:
        return (find_task(selection).uid,)  # a number beyond those of the frozen tasks
    except DomainError as error:
        refuse_broken()
        raise _unknown(selection, known) from error


def _of_datasets(selection: str) -> tuple[str, ...] | None:
    """The uids of a dataset or of a dataset's list with that name; None when no dataset has it.

    Raises:
        ConfigError: two datasets have a list of that name, or all datasets are asked for and none is registered.
    """
    datasets = registered_datasets()
    if selection == "datasets":
        refuse_broken()
        if not datasets:
            raise ConfigError("no dataset is registered. Set TBX_DATASETS to the paths of some, separated by colons.")
        return dataset_uids()
    for dataset in datasets:
        if dataset.name == selection:
            return dataset.uids()
    having = [dataset for dataset in datasets if selection in dataset.lists]
    if len(having) > 1:
        files = " and ".join(str(dataset.lists[selection]) for dataset in having)
        raise ConfigError(f"datasets have different lists '{selection}': {files}. Give the path of one of them.")
    return having[0].list_uids(selection) if having else None


def _unknown(selection: str, known: Iterable[str]) -> ConfigError:
    datasets = registered_datasets()
    names = ["all", "train", "heldout", *NAMES]
    names += ["datasets", *(dataset.name for dataset in datasets)] if datasets else []
    names += [name for dataset in datasets for name in dataset.lists]
    near = did_you_mean(selection, (*names, *known))
    return ConfigError(
        f"tasks '{selection}' is neither {', '.join(names)}, nor a uid, a pattern with *, ? or [] or a file.{near}"
    )


def _from_file(path: Path) -> tuple[str, ...]:
    is_yaml = path.suffix in (".yaml", ".yml")
    uids = tuple(map(uid_of_name, read_test_list(path))) if is_yaml else _lines_of(path)
    problems = [f"  {uid} is listed {uids.count(uid)} times" for uid in repeated(uids)]
    for uid in dict.fromkeys(uids):
        try:
            source_of(uid).require(uid)
        except DomainError as error:
            problems.append(f"  {error}")
    if problems or not uids:
        found = "\n".join(problems) or "  it lists no task"
        raise ConfigError(f"{path}: {len(problems) or 1} problem(s) in the list of tasks:\n{found}")
    return uids


def _lines_of(path: Path) -> tuple[str, ...]:
    text = read_text(path, "a list of tasks", to_do="Give a text file with one uid in each line.")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(uid for uid in lines if uid)
