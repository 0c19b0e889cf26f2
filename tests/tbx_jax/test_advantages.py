"""Advantages against hand-worked numbers."""

import numpy as np
import pytest

from tbx_envs.errors import DomainError, ShapeError
from tbx_jax.advantages import group_advantages, group_has_signal


def rewards(*values):
    return np.array(values, np.float32)


def test_an_advantage_is_the_reward_minus_the_mean_of_the_group():
    advantage_g = group_advantages(rewards(1, 0, 0, 1), normalize_by_std=False)
    assert advantage_g.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_normalised_advantages_are_divided_by_the_population_deviation():
    # mean 1/4; deviation sqrt(1/4 * 3/4) = 0.4330127
    advantage_g = group_advantages(rewards(1, 0, 0, 0), normalize_by_std=True)
    np.testing.assert_allclose(advantage_g, [1.7320508, -0.57735027, -0.57735027, -0.57735027], rtol=1e-6)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_rewards_that_differ_only_in_rounding_give_no_advantage(normalize_by_std):
    advantage_g = group_advantages(rewards(1, 1 + 1e-7, 1 - 1e-7, 1), normalize_by_std=normalize_by_std)
    assert advantage_g.tolist() == [0, 0, 0, 0]


def test_a_group_of_one_is_an_error():
    with pytest.raises(ShapeError, match="no baseline"):
        group_advantages(rewards(1), normalize_by_std=True)


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_reward_that_is_no_finite_number_is_an_error(reward):
    with pytest.raises(DomainError, match="finite"):
        group_advantages(rewards(0, reward), normalize_by_std=False)


@pytest.mark.parametrize(
    ("passed", "signal"), [((True, False), True), ((True, True), False), ((False, False, False), False)]
)
def test_only_mixed_outcomes_are_a_signal(passed, signal):
    assert group_has_signal(np.array(passed)) is signal
