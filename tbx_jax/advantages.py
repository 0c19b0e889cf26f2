"""Advantages of a group: how much better each attempt did than the others at the same task (GRPO).

The baseline is the mean reward of the group, so no value model is needed. Void attempts have no reward and must be
repeated before this. Pure functions of arrays.

Source: DeepSeekMath, section 4.1, https://arxiv.org/abs/2402.03300
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32

from tbx_envs.errors import DomainError, ShapeError

# Rewards that differ by less than this (relative to the largest) differ only by rounding: 1 and 1 + 1e-7 must not
# become a huge advantage through a tiny deviation.
SAME_REWARD = 1e-5


def group_has_signal(passed_g: Bool[np.ndarray, "g"]) -> bool:
    """True when some attempts passed and some did not.

    Outcomes decide, not rewards: equal outcomes with different shaped rewards are no signal, and equal rewards may
    differ by rounding.
    """
    return bool(passed_g.any() and not passed_g.all())


def group_advantages(reward_g: Float32[np.ndarray, "g"], *, normalize_by_std: bool) -> Float32[np.ndarray, "g"]:
    """Reward minus the group's mean, optionally divided by the group's standard deviation.

    Args:
        reward_g: reward of each attempt at one task; all finite.
        normalize_by_std: True to divide by the population deviation (over g, not g - 1), so that every group with
            signal has about the same weight at every pass rate.

    Returns:
        Advantages with sum zero; all exactly zero when the rewards are the same (see `SAME_REWARD`).

    Raises:
        ShapeError: fewer than two attempts.
        DomainError: a reward that is not a finite number.
    """
    if len(reward_g) < 2:
        raise ShapeError(
            f"a group of {len(reward_g)} attempt(s) has no baseline: an advantage compares attempts at one "
            f"task. Roll two or more (algo.group_size)."
        )
    if not np.isfinite(reward_g).all():
        raise DomainError(
            f"the rewards of a group are {reward_g.tolist()}; a reward is a finite number. "
            f"Fix the check, or make the episode void."
        )
    reward_g64 = reward_g.astype(np.float64)
    if np.ptp(reward_g64) <= SAME_REWARD * max(1.0, float(np.abs(reward_g64).max())):
        return np.zeros(len(reward_g), np.float32)
    centered_g = reward_g64 - reward_g64.mean()
    if normalize_by_std:
        centered_g /= reward_g64.std()
    return centered_g.astype(np.float32)
