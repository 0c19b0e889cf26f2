"""Oracle: scipy, which only tests need."""

import numpy as np
import pytest
import scipy
import scipy.special  # loaded here: within an example it would take longer than hypothesis allows
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.evaluation import beta
from tbx_envs.evaluation.metrics import jeffreys_interval
from tbx_envs.evaluation.pool import BANDS, band_masses, difficulty

COUNTS = [(n, c) for n in range(1, 65) for c in range(n + 1)]  # attempts, passes
ATTEMPTS, PASSES = np.array(COUNTS).T
POSTERIORS = (PASSES + 0.5, ATTEMPTS - PASSES + 0.5)
shapes = st.floats(0.05, 300.0)


@given(st.floats(0.0, 1.0), shapes, shapes)
def test_the_distribution_function_is_scipys(x, a, b):
    assert beta.cdf(x, a, b) == pytest.approx(scipy.special.betainc(a, b, x), abs=1e-12)


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.floats(0.0, 1.0))
def test_with_thousands_of_attempts_it_is_accurate_to_ten_digits(passes, failures, x):
    found = beta.cdf(x, passes + 0.5, failures + 0.5)
    assert found == pytest.approx(scipy.special.betainc(passes + 0.5, failures + 0.5, x), abs=1e-10)


@given(st.floats(0.005, 0.995), st.integers(0, 64), st.integers(0, 64))
def test_quantiles_are_scipys(probability, passes, failures):
    a, b = passes + 0.5, failures + 0.5
    assert beta.quantile(probability, a, b) == pytest.approx(scipy.special.betaincinv(a, b, probability), abs=1e-12)


@given(st.floats(0.0, 1.0, exclude_max=True), shapes, shapes)
def test_a_quantile_reaches_its_probability_and_the_number_before_it_does_not(probability, a, b):
    x = beta.quantile(probability, a, b)
    assert beta.cdf(x, a, b) >= probability
    assert probability == 0.0 or beta.cdf(np.nextafter(x, 0.0), a, b) < probability


@pytest.mark.parametrize(("x", "wanted"), [(-1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (2.0, 1.0)])
def test_all_mass_lies_between_zero_and_one(x, wanted):
    assert beta.cdf(x, 2.5, 0.5) == wanted


def test_masses_and_bands_are_those_of_scipy_for_up_to_64_attempts():
    ends = np.stack([scipy.stats.beta.cdf(end, *POSTERIORS) for end in BANDS.values()], axis=1)
    wanted = np.diff(ends, axis=1, prepend=0.0)
    masses = [list(band_masses(attempts, passes).values()) for attempts, passes in COUNTS]
    np.testing.assert_allclose(masses, wanted, rtol=0, atol=1e-12)
    bands = [difficulty(attempts, passes) for attempts, passes in COUNTS]
    assert bands == [list(BANDS)[number] for number in wanted.argmax(axis=1)]


def test_intervals_of_twenty_attempts_are_scipys():
    passes = np.arange(21)
    low, high = scipy.stats.beta.interval(0.95, passes + 0.5, 20.5 - passes)
    wanted = np.stack([np.where(passes == 0, 0.0, low), np.where(passes == 20, 1.0, high)], axis=1)
    found = [jeffreys_interval(20, count) for count in range(21)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
