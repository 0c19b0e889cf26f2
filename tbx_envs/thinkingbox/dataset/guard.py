"""The guard of the benchmark: its tasks are for evaluation, and choosing them for training is an error.

    python -m tbx_envs.thinkingbox.dataset.guard lock <checkout>     writes benchmark.lock beside this file

The configuration key `train_on_benchmark_and_mark_results` allows training on them; then every output is marked with
`trained_on_benchmark: true`, and so is everything that is derived from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.dataset import dataset_of, is_dataset_uid
from tbx_envs.thinkingbox.dataset.benchmark import FILE_NAME, RELEASE, lock_text

MARK = "trained_on_benchmark"
OVERRIDE = "train_on_benchmark_and_mark_results"
# File in the folder of a policy that was trained on tasks of the benchmark.
MARK_FILE = f"{MARK}.json"


def benchmark_uids(uids: Sequence[str]) -> tuple[str, ...]:
    """The uids of tasks of the benchmark or copies of them (`tbx_envs.thinkingbox.dataset.benchmark`).

    Raises:
        DomainError: a task is unknown or cannot be built.
    """
    return tuple(uid for uid in uids if is_dataset_uid(uid) and dataset_of(uid).task(uid).split == "heldout")


def refuse_benchmark(uids: Sequence[str], *, purpose: str) -> None:
    """Check that no task of the benchmark is used for training.

    Args:
        uids: ids of the chosen tasks.
        purpose: use of the tasks, for the message: `training`, `the pool`.

    Raises:
        ConfigError: some tasks are of the benchmark.
    """
    if found := benchmark_uids(uids):
        raise ConfigError(
            f"{len(found)} of {len(uids)} tasks are of {RELEASE} or copies of its tasks, such as {found[0]}, and the "
            f"benchmark is for evaluation only: {purpose} on them would spoil it. Choose other tasks. To do it "
            f"anyway, give {OVERRIDE}=true: every result is then marked {MARK}."
        )


def mark_policy(folder: Path) -> None:
    """Mark the policy in a folder."""
    (folder / MARK_FILE).write_text(json.dumps({MARK: True}) + "\n", encoding="utf-8")


def is_marked_policy(folder: Path | str) -> bool:
    """True when the policy in the folder was trained on tasks of the benchmark, or from a policy that was."""
    return (Path(folder) / MARK_FILE).is_file()


def write_lock(checkout: str) -> Path:
    """Write `benchmark.lock` from the data.

    Raises:
        DomainError: the checkout lacks the benchmark's list, or tasks in the list cannot be built.
    """
    from tbx_envs.thinkingbox.dataset.dataset import Dataset

    dataset = Dataset(checkout, test_list=RELEASE)
    dataset.refuse_unreadable()
    path = Path(__file__).with_name(FILE_NAME)
    path.write_text(lock_text(map(dataset.task, dataset.uids())), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tbx_envs.thinkingbox.dataset.guard", description="The lock of the benchmark."
    )
    lock = parser.add_subparsers(dest="action", required=True).add_parser("lock", help="write it from the data")
    lock.add_argument("checkout", help="checkout of the public ThinkingBox data")
    print(f"written: {write_lock(parser.parse_args().checkout)}")


if __name__ == "__main__":
    main()
