"""Two evaluation runs side by side, paired by task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.files import load_rows
from tbx_envs.evaluation.metrics import Tally, bootstrap_interval, measures
from tbx_envs.evaluation.run import tallies_of


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The change from the first evaluation run to the second, over the tasks that both attempted.

    Attributes:
        k: number of attempts at each task, the smaller of the two evaluation runs' numbers.
        measures: measures of the first and of the second, over the paired tasks; those named by k are over the tasks
            with k clean attempts in both, and `observed_<k>_of_<k>` is None for a run of more attempts.
        difference: mean over tasks of the second's pass rate minus the first's.
        interval: interval of the difference, paired tasks resampled together.
        only_first: number of tasks left out because the second has no clean attempt at them.
        only_second: number of tasks left out because the first has no clean attempt at them.
        short: number of paired tasks that are not in the measures of k, since a run has fewer clean attempts at them.
    """

    k: int
    measures: tuple[Mapping[str, Any], Mapping[str, Any]]
    difference: float
    interval: tuple[float, float]
    only_first: int
    only_second: int
    short: int = 0


def compare_folders(first: Path | str, second: Path | str, seed: int = 0) -> Comparison:
    """Compare two evaluation runs on disk.

    Raises:
        ConfigError: a folder holds no evaluation run, they share no task, or a shared task's content differs.
    """
    (head_a, rows_a), (head_b, rows_b) = load_rows(first), load_rows(second)
    shared = head_a["tasks"].keys() & head_b["tasks"].keys()
    changed = sorted(uid for uid in shared if head_a["tasks"][uid] != head_b["tasks"][uid])
    if changed:
        raise ConfigError(
            f"{len(changed)} task(s) are not the same in {first} and {second}, such as {changed[0]}: it changed "
            f"between tbx {head_a['tbx']} and {head_b['tbx']}. Evaluate both policies with the same version."
        )
    k = min(head_a["attempts"], head_b["attempts"])
    try:
        return compare(tallies_of(rows_a), tallies_of(rows_b), k, seed)
    except ConfigError as error:
        raise ConfigError(f"{first} and {second}: {error}") from error


def compare(first: Sequence[Tally], second: Sequence[Tally], k: int, seed: int = 0) -> Comparison:
    """Compare the tallies of two evaluation runs.

    Raises:
        ConfigError: no task has clean attempts in both.
    """
    of_first = {tally.uid: tally for tally in first if tally.attempts}
    of_second = {tally.uid: tally for tally in second if tally.attempts}
    uids = [uid for uid in of_first if uid in of_second]
    if not uids:
        raise ConfigError("no task has clean attempts in both runs; evaluate the same tasks.")
    differences = [of_second[uid].rate - of_first[uid].rate for uid in uids]
    full = [uid for uid in uids if min(of_first[uid].attempts, of_second[uid].attempts) >= k]

    def measured(run: Mapping[str, Tally]) -> dict[str, Any]:
        of_k = measures([run[uid] for uid in full], k, seed)
        names = (f"pass_at_{k}", f"pass_hat_{k}", f"pass_hat_{k}_plug_in", f"observed_{k}_of_{k}")
        return measures([run[uid] for uid in uids], k, seed) | {name: of_k[name] for name in names}

    return Comparison(
        k=k,
        measures=(measured(of_first), measured(of_second)),
        difference=math.fsum(differences) / len(uids),
        interval=bootstrap_interval(differences, seed),
        only_first=len(of_first) - len(uids),
        only_second=len(of_second) - len(uids),
        short=len(uids) - len(full),
    )
