"""Oracles: enumeration of every subset of attempts, numbers worked by hand, and a plain Python bootstrap."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.metrics import (
    Tally,
    bootstrap_interval,
    jeffreys_interval,
    measures,
    pass_at_k,
    pass_hat_k,
    pass_hat_k_plug_in,
)

counts = st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


def share_of_subsets(attempts, passes, k, wanted):
    outcomes = [True] * passes + [False] * (attempts - passes)
    subsets = list(itertools.combinations(outcomes, k))
    return Fraction(sum(wanted(subset) for subset in subsets), len(subsets))


@given(counts)
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case):
    assert pass_at_k(*case) == pytest.approx(float(share_of_subsets(*case, any)))


@given(counts)
def test_pass_hat_k_is_the_share_of_subsets_with_passes_only(case):
    assert pass_hat_k(*case) == pytest.approx(float(share_of_subsets(*case, all)))


def test_the_plug_in_estimate_of_three_passes_in_four_twice():
    assert pass_hat_k_plug_in(4, 3, 2) == 0.5625  # (3/4)^2; unbiased it is C(3,2)/C(4,2) = 1/2
    assert pass_hat_k(4, 3, 2) == 0.5


@pytest.mark.parametrize("case", [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_an_estimate_that_does_not_exist_is_refused(case):
    with pytest.raises(ConfigError, match="cannot estimate"):
        pass_at_k(*case)
    with pytest.raises(ConfigError, match="cannot estimate"):
        pass_hat_k(*case)


@pytest.mark.parametrize(("attempts", "passes"), [(20, 3), (8, 4), (5, 4)])
def test_the_jeffreys_interval_holds_its_level_of_the_posterior(attempts, passes):
    low, high = jeffreys_interval(attempts, passes)

    def density(rate):
        return rate ** (passes - 0.5) * (1 - rate) ** (attempts - passes - 0.5)

    whole = scipy.integrate.quad(density, 0, 1, epsabs=0)[0]
    assert scipy.integrate.quad(density, 0, low, epsabs=0)[0] / whole == pytest.approx(0.025, abs=1e-6)
    assert scipy.integrate.quad(density, high, 1, epsabs=0)[0] / whole == pytest.approx(0.025, abs=1e-6)


def test_the_jeffreys_interval_reaches_the_end_that_was_observed():
    assert jeffreys_interval(20, 0)[0] == 0.0
    assert jeffreys_interval(20, 20)[1] == 1.0
    assert 0.0 < jeffreys_interval(20, 0)[1] < 0.15


def test_the_bootstrap_is_a_function_of_its_seed():
    rates = np.random.default_rng(0).random(50).tolist()
    assert bootstrap_interval(rates, 1) == bootstrap_interval(rates, 1)
    assert bootstrap_interval(rates, 1) != bootstrap_interval(rates, 2)


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_tasks():
    rates = np.random.default_rng(0).beta(2, 3, 400)
    low, high = bootstrap_interval(rates.tolist())
    error = rates.std(ddof=1) / math.sqrt(len(rates))
    assert (low, high) == pytest.approx((rates.mean() - 1.96 * error, rates.mean() + 1.96 * error), abs=0.004)


def test_the_bootstrap_resamples_tasks_and_not_attempts():
    # Two tasks, one always and one never passed: however many attempts, a mean of tasks is 0, 1/2 or 1.
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)


def test_measures_of_a_run_worked_by_hand():
    tallies = [
        Tally("a/f/000", "f", passes=4, attempts=4),
        Tally("a/f/001", "f", passes=0, attempts=4),
        Tally("a/g/000", "g", passes=2, attempts=4),
        Tally("a/g/001", "g", passes=3, attempts=3, voids=1),  # short: not in pass@4, and not 4/4
        Tally("a/g/002", "g", passes=0, attempts=0, voids=4),
    ]
    found = measures(tallies, 4)
    assert found["tasks"] == 5
    assert (found["attempts"], found["passes"], found["voids"]) == (15, 9, 5)
    assert (found["tasks_short"], found["tasks_without_clean_attempts"]) == (2, 1)
    assert found["attempts_per_task"] == [0, 4]
    assert found["pass_at_1"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found["pass_at_4"] == pytest.approx(2 / 3)
    assert found["pass_hat_4"] == pytest.approx(1 / 3)
    assert found["pass_hat_4_plug_in"] == pytest.approx((1 + 0 + 0.5**4 + 1) / 4)
    assert found["observed_4_of_4"] == 1


def test_passing_all_of_more_attempts_is_no_observation_of_k_of_k():
    found = measures([Tally("a/f/000", "f", 20, 20), Tally("a/f/001", "f", 8, 8)], 8)
    assert found["observed_8_of_8"] is None and found["pass_hat_8"] == 1.0


def test_voids_change_no_measure():
    clean = [Tally("a/f/000", "f", 3, 4), Tally("a/f/001", "f", 1, 4)]
    with_voids = [Tally("a/f/000", "f", 3, 4, voids=9), Tally("a/f/001", "f", 1, 4)]
    first, second = measures(clean, 4), measures(with_voids, 4)
    assert {**first, "voids": 9} == second


def test_no_clean_attempt_gives_no_number_rather_than_zero():
    found = measures([Tally("a/f/000", "f", 0, 0, voids=2)], 2)
    assert found["pass_at_1"] is None
    assert found["pass_at_2"] is None
    assert found["pass_at_1_interval"] is None
