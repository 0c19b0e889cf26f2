"""Small functions that tests compute a reward with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def average_reward(rewards: Mapping[str, float], weights: Mapping[str, float] | None = None) -> float:
    """The mean of the rewards; with weights, the weighted mean of those with a weight. 0 when there are none."""
    if not weights:
        return sum(rewards.values()) / len(rewards) if rewards else 0.0
    shared = rewards.keys() & weights.keys()
    return (
        sum(rewards[name] * weights[name] for name in shared) / sum(weights[name] for name in shared) if shared else 0.0
    )


def match_score(result: Any, expected: Any, partial: bool = False, is_critical: bool = False) -> float:
    """1 when both are equal, else 0; with `partial`, the share of the expected dictionary's items in the result.

    Raises:
        AssertionError: they differ, and `is_critical` is set.
        ValueError: they cannot be compared.
    """
    if type(result) is not type(expected):
        raise ValueError(f"a {type(result).__name__} cannot be compared with a {type(expected).__name__}")
    if partial and not isinstance(expected, dict):
        raise ValueError("only dictionaries can match in part")
    if partial:
        score = sum(key in result and result[key] == value for key, value in expected.items()) / len(expected)
    else:
        score = 1.0 if result == expected else 0.0
    if is_critical and score < 1.0:
        raise AssertionError(f"expected {expected!r}, got {result!r} (score {score:g})")
    return score
