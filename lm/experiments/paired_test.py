"""Paired t tests with few pairs: p values, bounds and power; and the error that later looks at more pairs leave.

Student's t is exact for differences with a normal distribution, also for three of them. One seed gives both losses of a
pair, as Bouthillier et al. 2021 ("Accounting for variance in machine learning benchmarks") recommend.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean

import numpy as np

MAX_PAIRS = 10_000
_POWER = 0.8
_DEVIATIONS = 9  # of the scale of the differences, over which the power is integrated
_PLACES = 1001


def t_cdf(t: float, freedom: int) -> float:
    """Return the probability that Student's t with these degrees of freedom is at most ``t``.

    Source: Abramowitz & Stegun 26.7.3 and 26.7.4, finite sums for whole degrees of freedom.
    """
    angle = math.atan(t / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = term if freedom > 1 else 0.0
    for number in range(2 + odd, freedom - 1, 2):
        term *= square * (number - 1) / number
        total += term
    inside = 2 / math.pi * (angle + total) if odd else total
    return 0.5 + 0.5 * max(-1.0, min(1.0, inside))


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the t whose :func:`t_cdf` is ``probability``, by bisection; infinite for 0 and 1."""
    if not 0 < probability < 1:
        return math.inf if probability >= 1 else -math.inf
    high = 1.0
    while t_cdf(high, freedom) < probability or t_cdf(-high, freedom) > probability:
        high *= 2
    low = -high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return middle


def p_greater(differences: Sequence[float], least: float) -> float:
    """Return the one-sided p value of a paired t test: small if the mean of the differences is above ``least``."""
    excess, error = fmean(differences) - least, standard_error(differences)
    if not error:
        return 0.0 if excess > 0 else 1.0
    return t_cdf(-excess / error, len(differences) - 1)


def upper_bound(differences: Sequence[float], level: float) -> float:
    """Return the bound that the true mean difference is above with a probability of at most ``level``. Of a level above
    one half it is a lower bound."""
    error = standard_error(differences)
    return fmean(differences) + (t_quantile(1 - level, len(differences) - 1) * error if error else 0.0)


def standard_error(differences: Sequence[float]) -> float:
    """Return the standard error of the mean difference."""
    mean, count = fmean(differences), len(differences)
    return math.sqrt(sum((difference - mean) ** 2 for difference in differences) / (count * (count - 1)))


def power(effect: float, pairs: int, level: float) -> float:
    """Return the probability that p is at most ``level`` if the mean difference is ``effect`` times its deviation.

    The probability for a known deviation, integrated over the deviations that ``pairs`` differences show.
    """
    freedom = pairs - 1
    limit = t_quantile(1 - level, freedom)
    if math.isinf(limit):
        return 0.0
    spread = _DEVIATIONS / math.sqrt(2 * freedom)
    scales = np.linspace(max(0.0, 1 - spread), 1 + spread, _PLACES)[1:]
    log_density = (freedom - 1) * np.log(scales) - freedom * scales**2 / 2
    density = np.exp(log_density - log_density.max())
    shift = effect * math.sqrt(pairs)
    found = [NormalDist().cdf(shift - limit * float(scale)) for scale in scales]
    return float((density * found).sum() / density.sum())


def level_left(pairs: int, max_pairs: int, level: float, spent: float) -> float:
    """Return the level of a look at ``pairs`` pairs, after earlier looks that spent ``spent`` of the whole ``level``.

    Up to a number of pairs, all looks together may spend its share of ``max_pairs``: a spending function as of Lan &
    DeMets 1983, linear (Kim & DeMets 1987). The levels of the looks add up to at most ``level``. So whatever decides
    when to look again, and however the looks depend on each other, a true null is rejected no more often (Bonferroni).
    """
    return max(0.0, level * min(1.0, pairs / max_pairs) - spent)


def pairs_needed(effects: Sequence[float], pairs: int, max_pairs: int, level: float, spent: float) -> int | None:
    """Return how many pairs find all ``effects`` in 80 % of cases, in a look after one at ``pairs`` pairs.

    ``effects`` are independent, see :func:`power`. ``level`` and ``spent``: see :func:`level_left`. None: more than
    ``MAX_PAIRS``, or no level is left.
    """

    def is_enough(count: int) -> bool:
        left = level_left(count, max_pairs, level, spent)
        return math.prod(power(effect, count, left) for effect in effects) >= _POWER

    low, high = pairs, pairs + 1
    while high <= MAX_PAIRS and not is_enough(high):
        low, high = high, 2 * high
    if high > MAX_PAIRS:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
