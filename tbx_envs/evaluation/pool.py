"""The pool: tasks worth training on, selected once by how often a policy solves them, and frozen in a file.

The difficulty of a task for a policy is the band with the most mass under the Jeffreys posterior Beta(c + 1/2, n - c
+ 1/2) of its pass rate, over its clean attempts. A task that always or never passes gives a group of equal rewards,
from which nothing is learnt. The selection precedes training; the file has the hashes of everything that it depends on.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.domains import load_domain
from tbx_envs.errors import ConfigError, DomainError
from tbx_envs.evaluation import beta
from tbx_envs.evaluation.files import with_current_keys
from tbx_envs.evaluation.metrics import Tally
from tbx_envs.files import read_object, storing, write_json
from tbx_envs.sources import find_task, task_hash
from tbx_envs.thinkingbox.dataset import is_dataset_uid
from tbx_envs.thinkingbox.dataset.guard import MARK, benchmark_uids, refuse_benchmark
from tbx_envs.version import __version__

# Upper ends of the bands' pass rates, from hardest to easiest; a rate equal to an end belongs to the next band.
BANDS = {"too_hard": 0.08, "hard": 0.40, "medium": 0.60, "easy": 0.90, "too_easy": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class PoolTask:
    """A candidate for the pool.

    Attributes:
        uid: task id.
        band: difficulty, a key of `BANDS`; `unknown` without a clean attempt.
        passes: number of clean attempts that passed.
        attempts: number of clean attempts.
        content_hash: hash of the task (`tbx_envs.sources.task_hash`).
        kept: True when the task is in the pool.
    """

    uid: str
    band: str
    passes: int
    attempts: int
    content_hash: str
    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The content of a pool file.

    Attributes:
        candidates: all tasks that were attempted, kept or not.
        bands: bands that were kept.
        policy: fingerprint of the policy whose pass rates were estimated.
        seed: seed of the evaluation run that estimated them.
        locks: built-in domain -> SHA-256 of its `tasks.lock` entries.
        tbx: version that made the file.
        trained_on_benchmark: True when tasks of the benchmark are in the pool on purpose; whatever is trained on it is
            marked too.
    """

    candidates: tuple[PoolTask, ...]
    bands: tuple[str, ...]
    policy: Mapping[str, Any]
    seed: int
    locks: Mapping[str, str]
    tbx: str
    trained_on_benchmark: bool = False

    @property
    def uids(self) -> tuple[str, ...]:
        """The tasks to train on."""
        return tuple(task.uid for task in self.candidates if task.kept)


def band_masses(attempts: int, passes: int) -> dict[str, float]:
    """Posterior probability of each band."""
    ends = [beta.cdf(end, passes + 0.5, attempts - passes + 0.5) for end in BANDS.values()]
    return {band: high - low for band, high, low in zip(BANDS, ends, [0.0, *ends[:-1]], strict=True)}


def difficulty(attempts: int, passes: int) -> str:
    """The band with most posterior mass; `unknown` without attempts."""
    if attempts == 0:
        return "unknown"
    masses = band_masses(attempts, passes)
    return max(masses, key=masses.__getitem__)


def select_pool(
    tallies: Sequence[Tally],
    *,
    bands: Sequence[str],
    policy: Mapping[str, Any],
    seed: int,
    train_on_benchmark: bool = False,
) -> Pool:
    """The pool of the tasks whose difficulty is one of `bands`.

    Args:
        tallies: one tally for each candidate.
        bands: bands to keep.
        policy: fingerprint of the policy that made the attempts.
        seed: seed of the evaluation run.
        train_on_benchmark: True lets tasks of the benchmark through (`refuse_heldout`).

    Raises:
        ConfigError: a task is held out for evaluation, or no task is left.
    """
    refuse_heldout([tally.uid for tally in tallies], purpose="a pool", train_on_benchmark=train_on_benchmark)
    candidates = []
    for tally in tallies:
        band = difficulty(tally.attempts, tally.passes)
        sha256 = task_hash(tally.uid)
        candidates.append(PoolTask(tally.uid, band, tally.passes, tally.attempts, sha256, band in bands))
    if not any(task.kept for task in candidates):
        found = {band: sum(task.band == band for task in candidates) for band in (*BANDS, "unknown")}
        raise ConfigError(
            f"none of {len(candidates)} tasks is in the bands {', '.join(bands)}; the tasks of each band are {found}. "
            f"Keep other bands, choose other tasks, or start from another policy."
        )
    domains = sorted({task.uid.partition("/")[0] for task in candidates if not is_dataset_uid(task.uid)})
    locks = {name: lock_digest(name) for name in domains}
    marked = bool(benchmark_uids([task.uid for task in candidates if task.kept]))
    return Pool(tuple(candidates), tuple(bands), dict(policy), seed, locks, __version__, marked)


def refuse_heldout(uids: Sequence[str], *, purpose: str = "training", train_on_benchmark: bool = False) -> None:
    """Refuse tasks that are held out for evaluation, since training on them would spoil the evaluation.

    Args:
        uids: task ids.
        purpose: purpose of the tasks, for the message.
        train_on_benchmark: True lets tasks of the benchmark through (`tbx_envs.thinkingbox.dataset.guard`); the
            caller marks the results. Held-out tasks of the built-in domains are refused in any case.

    Raises:
        ConfigError: a task is held out.
    """
    if not train_on_benchmark:
        refuse_benchmark(uids, purpose=purpose)
    benchmark = set(benchmark_uids(uids))
    heldout = [uid for uid in uids if uid not in benchmark and find_task(uid).split == "heldout"]
    if heldout:
        raise ConfigError(
            f"{len(heldout)} of {len(uids)} tasks are held out for evaluation, such as {heldout[0]}, and "
            f"training on them would spoil it. Choose tasks=train or some of them."
        )


def lock_digest(domain_name: str) -> str:
    """SHA-256 (hex) over the domain's locked hashes."""
    lines = "".join(f"{uid} {sha256}\n" for uid, sha256 in sorted(load_domain(domain_name).lock.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def save_pool(pool: Pool, path: Path) -> None:
    """Freeze the pool in a file.

    Raises:
        ConfigError: the file holds another pool; a pool never changes.
    """
    record = _record(pool)
    if path.is_file():
        there = read_object(path, "a pool", to_do="Choose another file.")
        if isinstance(there.get("policy"), dict):
            there["policy"] = with_current_keys(there["policy"])
        if there != record:
            raise ConfigError(f"{path} holds another pool, and a pool never changes. Choose another file.")
        return
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)


def read_pool(path: Path | str) -> Pool:
    """The pool of a file as it was written; its tasks need not be known here.

    Raises:
        ConfigError: no such file, or not a pool file.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no pool at {path}. Make one with `tbx pool`, or give pool=null.")
    try:
        record = read_object(path, "a pool", to_do="Make one with `tbx pool`.")
        candidates = tuple(PoolTask(**task) for task in record.pop("tasks"))
        pool = Pool(candidates=candidates, **{**record, "bands": tuple(record["bands"])})
        _refuse_other_kinds(pool)
        return pool
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a pool file ({error}). Make one with `tbx pool`.") from error


def _refuse_other_kinds(pool: Pool) -> None:
    """Raises ValueError for values of another kind than the program reads: a text of "false" is true."""
    if type(pool.trained_on_benchmark) is not bool:
        raise ValueError(f"{MARK} is {pool.trained_on_benchmark!r}, wanted true or false")
    for task in pool.candidates:
        if not isinstance(task.uid, str) or type(task.kept) is not bool:
            raise ValueError(f"a task has uid {task.uid!r} and kept {task.kept!r}, wanted a text and true or false")
    uids = collections.Counter(task.uid for task in pool.candidates)
    if twice := [uid for uid, count in uids.items() if count > 1]:
        raise ValueError(f"{len(twice)} tasks are there twice, such as {twice[0]}")


def load_pool(path: Path | str) -> Pool:
    """The pool of a file, after comparing its tasks with the current ones.

    Raises:
        ConfigError: no such file, not a pool file, a kept task that no longer exists or has changed, or a task of the
            benchmark in a pool that is not marked.
    """
    pool = read_pool(path)
    problems = [problem for task in pool.candidates if task.kept and (problem := _problem(task))]
    if problems:
        shown = "\n".join(problems[:10])
        raise ConfigError(
            f"{path}: {len(problems)} of {len(pool.uids)} tasks are not as they were when the pool was "
            f"frozen (tbx {pool.tbx}, this is {__version__}):\n{shown}\nMake a new pool with `tbx pool`."
        )
    if not pool.trained_on_benchmark and (found := benchmark_uids(pool.uids)):
        raise ConfigError(
            f"{path}: {len(found)} of {len(pool.uids)} tasks are of the benchmark, such as {found[0]}, and the file is "
            f"not marked {MARK}. Make a new pool with `tbx pool`, which refuses or marks them."
        )
    return pool


def _problem(task: PoolTask) -> str | None:
    try:
        return None if task_hash(task.uid) == task.content_hash else f"  {task.uid} has changed"
    except DomainError as error:
        return f"  {error}"


def _record(pool: Pool) -> dict[str, Any]:
    record = dataclasses.asdict(pool)
    tasks = record.pop("candidates")
    return json.loads(json.dumps({**record, "tasks": tasks}))
