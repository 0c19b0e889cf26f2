"""The guard of the benchmark: its tasks are for evaluation, and are refused where tasks are chosen to train on.

    python -m tbx_envs.thinkingbox.dataset.guard lock <checkout>     writes benchmark.lock beside this file

Who trains on them all the same says so by the configuration key `train_on_benchmark_and_mark_results`; then every
output carries `trained_on_benchmark: true`, which whatever is made from it inherits.
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
# In a policy's folder: says that it was trained on tasks of the benchmark.
MARK_FILE = f"{MARK}.json"


def benchmark_uids(uids: Sequence[str]) -> tuple[str, ...]:
    """Those that are tasks of the benchmark or copies of one, by uid, by content or by the user's words.

    Raises:
        DomainError: a task that is not known or cannot be built.
    """
    return tuple(uid for uid in uids if is_dataset_uid(uid) and dataset_of(uid).task(uid).split == "heldout")


def refuse_benchmark(uids: Sequence[str], *, purpose: str) -> None:
    """Tasks of the benchmark are not for training.

    Args:
        purpose: what they would be used for, for the message: `training`, `the pool`.

    Raises:
        ConfigError: some of them are.
    """
    if found := benchmark_uids(uids):
        raise ConfigError(
            f"{len(found)} of {len(uids)} tasks are of {RELEASE} or copies of its tasks, such as {found[0]}, and the "
            f"benchmark is for evaluation only: {purpose} on them would spoil it. Choose other tasks. To do it "
            f"nevertheless give {OVERRIDE}=true: every result is then marked {MARK}."
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
        DomainError: the checkout lacks the benchmark's list, or tasks of it cannot be built.
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
    lock.add_argument("checkout", help="of the public ThinkingBox data")
    print(f"written: {write_lock(parser.parse_args().checkout)}")


if __name__ == "__main__":
    main()
