"""Which tasks: one string, as given on a command line, becomes uids; and a uid becomes its task."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path

from tbx_envs.domains import NAMES, load_domain
from tbx_envs.errors import ConfigError, DomainError, did_you_mean
from tbx_envs.task import Task


def all_uids(split: str | None = None) -> tuple[str, ...]:
    """Uids of the frozen tasks of all domains, of one split or of both; builds no task."""
    return tuple(uid for name in NAMES for uid in load_domain(name).uids(split))


def find_task(uid: str) -> Task:
    """The task of that uid.

    Raises:
        DomainError: no such domain or family.
    """
    try:
        domain = load_domain(uid.partition("/")[0])
    except DomainError as error:
        raise DomainError(f"unknown task '{uid}': {error}{did_you_mean(uid, all_uids())}") from error
    return domain.task(uid)


def is_unseen_family(task: Task) -> bool:
    """True when the task's family has no training tasks."""
    return load_domain(task.domain).families[task.family].num_train == 0


def select_tasks(selection: str) -> tuple[str, ...]:
    """The uids that `selection` means, in canonical order or in the order of the file.

    Args:
        selection: `all`, `train`, `heldout`, a domain's name, a uid, a pattern such as `clinic/*/00?`, or a
            file with one uid a line (`#` starts a comment).

    Raises:
        ConfigError: nothing has that name, nothing matches, or a file names a task twice or one that is
            unknown.
    """
    if selection in ("all", "train", "heldout"):
        return all_uids(None if selection == "all" else selection)
    if selection in NAMES:
        return load_domain(selection).uids()
    known = all_uids()
    if "*" in selection or "?" in selection:
        matching = tuple(fnmatch.filter(known, selection))
        if not matching:
            raise ConfigError(f"no task matches '{selection}'. There are {len(known)}, such as '{known[0]}'.")
        return matching
    if selection in known:
        return (selection,)
    if Path(selection).is_file():
        return _from_file(Path(selection))
    try:
        return (find_task(selection).uid,)  # a number beyond the frozen ones
    except DomainError as error:
        names = ("all", "train", "heldout", *NAMES)
        near = did_you_mean(selection, (*names, *known))
        raise ConfigError(
            f"tasks '{selection}' is neither {', '.join(names)}, nor a uid, a pattern with * or a file.{near}"
        ) from error


def _from_file(path: Path) -> tuple[str, ...]:
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    uids = tuple(uid for uid in lines if uid)
    problems = [f"  {uid} is listed {uids.count(uid)} times" for uid in _repeated(uids)]
    for uid in dict.fromkeys(uids):
        try:
            find_task(uid)
        except DomainError as error:
            problems.append(f"  {error}")
    if problems or not uids:
        found = "\n".join(problems) or "  it names no task"
        raise ConfigError(f"{path}: {len(problems) or 1} problem(s) in the list of tasks:\n{found}")
    return uids


def _repeated(uids: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    repeated: dict[str, None] = {}
    for uid in uids:
        if uid in seen:
            repeated[uid] = None
        seen.add(uid)
    return list(repeated)
