"""The beta distribution: its cumulative distribution function and its quantiles, without scipy.

A posterior of a pass rate is one, and its two functions are all that evaluation needs of a library of 100 MB whose
import takes longer than that of everything else here together. Both agree with scipy to 1e-12 (tests compare them).

Source: the continued fraction of the incomplete beta function, https://dlmf.nist.gov/8.17#v, evaluated by Lentz's
method as modified by Thompson and Barnett (1986).
"""

from __future__ import annotations

import math

_TINY = 1e-300  # in place of a zero denominator
_EPSILON = 1e-15
# Convergence takes O(sqrt(max(a, b))) terms: about 40 for a hundred attempts, 3,000 for a billion.
_MAX_TERMS = 10_000


def cdf(x: float, a: float, b: float) -> float:
    """Probability that a Beta(a, b) variable is at most `x`: the regularised incomplete beta function."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # on this side the fraction of the mirrored variable converges
        return 1.0 - cdf(1.0 - x, b, a)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) * _continued_fraction(x, a, b) / a


def quantile(probability: float, a: float, b: float) -> float:
    """The `x` whose `cdf` is `probability`, by bisection down to neighbouring floating-point numbers."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return high


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d1 / (1 + d2 / ...)) with the coefficients of DLMF 8.17.23."""
    c, d = 1.0, 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            d = 1.0 / _not_zero(1.0 + coefficient * d)
            c = _not_zero(1.0 + coefficient / c)
            value *= c * d
        if abs(c * d - 1.0) <= _EPSILON:
            return value
    raise ArithmeticError(f"the incomplete beta function of {x} with a={a}, b={b} does not converge")


def _not_zero(denominator: float) -> float:
    return denominator if abs(denominator) > _TINY else _TINY
