"""The measures of an evaluation run: pass@k, pass^k, observed n/n, and their intervals.

Every measure is computed from one `Tally` per task: passes and clean attempts. Void attempts are counted separately and
are part of no measure. Tasks are the independent units, attempts at one task are not: intervals resample whole tasks.

Sources:
    pass@k: Chen et al. 2021, https://arxiv.org/abs/2107.03374, section 2.1
    clustering: Miller 2024, https://arxiv.org/abs/2411.00640
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tbx_envs.errors import ConfigError
from tbx_envs.evaluation import beta
from tbx_envs.seeding import derive

LEVEL = 0.95  # confidence level of every interval
RESAMPLES = 2000  # leaves 50 resamples beyond each end of a 95% interval


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """The attempts at one task, counted.

    Attributes:
        uid: task id.
        family: family of the task.
        passes: number of clean attempts that passed.
        attempts: number of clean attempts.
        voids: number of attempts that remained void; they are in none of the other numbers.
    """

    uid: str
    family: str
    passes: int
    attempts: int
    voids: int = 0

    @property
    def rate(self) -> float:
        """Share of clean attempts that passed; there must be at least one."""
        return self.passes / self.attempts


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """Probability that at least one of `k` attempts passes, unbiased: 1 - C(n-c, k) / C(n, k).

    Raises:
        ConfigError: fewer than `k` attempts, for which no unbiased estimate exists.
    """
    _require_possible(attempts, passes, k)
    return 1.0 - math.comb(attempts - passes, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, passes: int, k: int) -> float:
    """Probability that all of `k` attempts pass (pass^k), unbiased: C(c, k) / C(n, k).

    Raises:
        ConfigError: fewer than `k` attempts, for which no unbiased estimate exists.
    """
    _require_possible(attempts, passes, k)
    return math.comb(passes, k) / math.comb(attempts, k)


def pass_hat_k_plug_in(attempts: int, passes: int, k: int) -> float:
    """(c/n)^k, which the ThinkingBox tools print as pass^k. Biased upwards, but defined for every `k`."""
    _require_possible(attempts, passes, 1)
    return (passes / attempts) ** k


def _require_possible(attempts: int, passes: int, k: int) -> None:
    if not (1 <= k <= attempts and 0 <= passes <= attempts):
        raise ConfigError(
            f"cannot estimate {k} attempts from {passes} passes of {attempts}; required are 1 <= k <= attempts and "
            f"0 <= passes <= attempts. Make more attempts or choose a smaller k."
        )


def jeffreys_interval(attempts: int, passes: int, level: float = LEVEL) -> tuple[float, float]:
    """Interval of one task's pass rate: quantiles of Beta(c + 1/2, n - c + 1/2).

    As is customary, the lower end is 0 when no attempt passed and the upper end is 1 when all did, so that the interval
    always contains the observed rate.
    """
    a, b = passes + 0.5, attempts - passes + 0.5
    low = 0.0 if passes == 0 else beta.quantile((1 - level) / 2, a, b)
    high = 1.0 if passes == attempts else beta.quantile((1 + level) / 2, a, b)
    return low, high


def bootstrap_interval(per_task: Sequence[float], seed: int = 0, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of the mean over tasks, tasks resampled with replacement.

    Args:
        per_task: one number for each task, for example its pass rate or a difference of two.
        seed: seed of the resampling; the same seed gives the same interval.
        level: confidence level.

    Returns:
        (nan, nan) without tasks.
    """
    values = np.asarray(per_task, np.float64)
    if values.size == 0:
        return math.nan, math.nan
    generator = np.random.default_rng(derive(seed, "bootstrap"))
    means = [values[generator.integers(0, values.size, values.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def measures(tallies: Sequence[Tally], k: int, seed: int = 0) -> dict[str, Any]:
    """All measures of a set of tasks, ready for JSON.

    Args:
        tallies: one tally for each task.
        k: number of attempts asked for at each task: the k of pass@k and pass^k and the n of n/n. It may be less than
            were made, as when runs of different sizes are compared.
        seed: seed of the bootstrap.

    Returns:
        `tasks`, `attempts`, `passes`, `voids`; `tasks_without_clean_attempts`, `tasks_short` (fewer than k
        clean attempts, which pass@k and pass^k therefore leave out) and `attempts_per_task` [fewest, most];
        `pass_at_1` with `pass_at_1_interval`; `pass_at_<k>`, `pass_hat_<k>` (unbiased),
        `pass_hat_<k>_plug_in`; `observed_<k>_of_<k>`, the number of tasks with k clean attempts that passed all of
        them. It is None when a task has more than k: passing all of 20 is no observation of 8 of 8, which
        `pass_hat_<k>` estimates. A mean over no task is None.
    """
    clean = [tally for tally in tallies if tally.attempts]
    full = [tally for tally in clean if tally.attempts >= k]
    counts = [tally.attempts for tally in tallies]
    return {
        "tasks": len(tallies),
        "attempts": sum(counts),
        "passes": sum(tally.passes for tally in tallies),
        "voids": sum(tally.voids for tally in tallies),
        "tasks_without_clean_attempts": len(tallies) - len(clean),
        "tasks_short": len(tallies) - len(full),
        "attempts_per_task": [min(counts, default=0), max(counts, default=0)],
        "pass_at_1": _mean([tally.rate for tally in clean]),
        "pass_at_1_interval": list(bootstrap_interval([t.rate for t in clean], seed)) if clean else None,
        f"pass_at_{k}": _mean([pass_at_k(t.attempts, t.passes, k) for t in full]),
        f"pass_hat_{k}": _mean([pass_hat_k(t.attempts, t.passes, k) for t in full]),
        f"pass_hat_{k}_plug_in": _mean([pass_hat_k_plug_in(t.attempts, t.passes, k) for t in clean]),
        f"observed_{k}_of_{k}": _observed(full, k),
    }


def _observed(full: Sequence[Tally], k: int) -> int | None:
    if any(tally.attempts > k for tally in full):
        return None
    return sum(tally.passes == k for tally in full)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
