"""The provenance of a program's run, `run.json`: its command, configuration, commit and library versions.

At most one process at a time works in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.errors import CheckpointError, ConfigError, DomainError
from tbx_envs.files import read_object, storing, write_bytes, write_json
from tbx_envs.version import __version__

# Libraries that could change a result; each is listed only where it is installed.
LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "transformers", "tokenizers"),
    *("gymnasium", "sqlalchemy", "mcp", "jsonschema", "pydantic", "hydra-core", "jinja2"),
)

# What refuses a command before its run has begun.
REFUSALS = (ConfigError, DomainError, CheckpointError)
_LOCK = ".lock"
# Subcommand -> one whose runs it can go on with: a pool is chosen by an evaluation run, and `sft` was called otherwise.
_KINDS = {"pool": "evaluate", "warmstart": "sft"}


def write_provenance(folder: Path | str, config: Mapping[str, Any], command: Sequence[str]) -> None:
    """Write `run.json`.

    Args:
        folder: folder of the run.
        config: composed configuration, as JSON values.
        command: command as typed.
    """
    record = {
        "command": list(command),
        "config": config,
        "tbx": __version__,
        "commit": commit(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libraries": library_versions(),
    }
    folder = Path(folder)
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", record)


@contextlib.contextmanager
def provenance(
    folder: Path | str,
    config: Mapping[str, Any],
    command: Sequence[str],
    records: Mapping[str, str] = types.MappingProxyType({}),
) -> Iterator[None]:
    """Write `run.json` for the duration of a run and after it; a run that is refused leaves the folder as it was.

    Args:
        folder: folder of the run.
        config: composed configuration, as JSON values.
        command: command as typed.
        records: further files about the run: path in the folder -> text.

    Raises:
        ConfigError: another process is working in this folder, or it has a run of another kind, whose record would be
            lost.
    """
    folder = Path(folder)
    with _alone_in(folder):
        _refuse_another_kind(folder, command)
        paths = [folder / name for name in ("run.json", *records)]
        before = {path: path.read_bytes() if path.is_file() else None for path in paths}
        write_provenance(folder, config, command)
        for name, text in records.items():
            with storing(folder / name):
                (folder / name).parent.mkdir(exist_ok=True)
            write_bytes(folder / name, text.encode())
        try:
            yield
        except REFUSALS:
            for path, earlier in before.items():
                if earlier is None:
                    path.unlink(missing_ok=True)
                else:
                    write_bytes(path, earlier)
            raise


def _refuse_another_kind(folder: Path, command: Sequence[str]) -> None:
    """Refuse a folder with the run of another subcommand; an evaluation run may become that of a pool."""
    try:
        record = read_object(folder / "run.json", "the record of a run", to_do="")
        there, asked = record["command"][1], command[1]
    except (ConfigError, LookupError, TypeError):  # none, or one that says nothing
        return
    if _KINDS.get(there, there) != _KINDS.get(asked, asked):
        raise ConfigError(f"{folder} has a run of `tbx {there}`. Choose another output_dir for `tbx {asked}`.")


def remove_traces(folder: Path | str) -> None:
    """Remove the folder of a run that was refused before it wrote anything, and folders around it that hold nothing
    else; does nothing where there is anything of a run. The working folder stays, and what it is in."""
    folder = Path(folder).absolute()
    if not folder.is_dir() or {path.name for path in folder.rglob("*")} - {_LOCK, ".hydra"}:
        return
    (folder / _LOCK).unlink(missing_ok=True)
    folder, here = folder.resolve(), Path.cwd()
    around = (parent for parent in folder.parents if parent.is_relative_to(here) and parent != here)
    made = () if here.is_relative_to(folder) else (folder, *around)
    with contextlib.suppress(OSError):  # the first that is not empty ends it
        for empty in (*folder.glob(".hydra"), *made):
            empty.rmdir()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder: two processes would write into each other's files.

    The lock belongs to this process: children do not inherit it, and it ends with the process, however that ends.
    """
    with storing(folder / _LOCK):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a+", encoding="utf-8")
    with lock as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise ConfigError(
                f"{folder}: process {file.read().strip()} is working in this folder. Wait until it has ended, or "
                f"choose another output_dir."
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def mark_provenance(folder: Path | str, fact: str) -> None:
    """Add `fact: true` to a run's `run.json`; does nothing where the file does not exist (a run from Python)."""
    path = Path(folder) / "run.json"
    if path.is_file():
        record = read_object(path, "the record of a run", to_do="Remove it, or choose another output_dir.")
        write_json(path, {**record, fact: True})


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that could change a result."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """The git commit of this package's own checkout, with `+` when files have changed since; None outside a checkout.

    A package that is installed inside another repository does not belong to it.
    """
    here = Path(__file__)
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head, changes = (
        _git(here, "rev-parse", "HEAD"),
        _git(here, "status", "--porcelain", "--untracked-files=no"),
    )
    return None if head is None else head + ("+" if changes else "")


def _git(here: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
