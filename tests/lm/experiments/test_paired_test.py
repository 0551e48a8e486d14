"""Student's t, the power of the paired test, and the error that several looks may spend."""

import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.experiments.paired_test import (
    MAX_PAIRS,
    level_left,
    p_greater,
    pairs_needed,
    power,
    t_cdf,
    t_quantile,
    upper_bound,
)


def reference_cdf(t: float, freedom: int) -> float:
    """Integrate the density of Student's t from 0 by Simpson's rule."""
    places = np.linspace(0, t, 20_001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(places**2 / freedom))
    weights = np.full(20_001, 2.0)
    weights[1::2], weights[[0, -1]] = 4.0, 1.0
    return float(0.5 + (weights * density).sum() * t / 20_000 / 3)


@given(st.floats(-8, 8), st.integers(1, 60))
def test_the_finite_sums_are_the_integral_of_the_density(t: float, freedom: int) -> None:
    assert t_cdf(t, freedom) == pytest.approx(reference_cdf(t, freedom), abs=1e-9)


@pytest.mark.parametrize(
    ("probability", "freedom", "t"), [(0.99, 9, 2.8214), (0.975, 11, 2.2010), (0.995, 1, 63.6567), (0.99, 120, 2.3578)]
)
def test_quantiles_of_printed_tables(probability: float, freedom: int, t: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(t, abs=1e-4)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-t, abs=1e-4)


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 200))
def test_a_quantile_is_the_inverse(probability: float, freedom: int) -> None:
    assert t_cdf(t_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-12)


def test_a_p_value_and_its_bound_agree() -> None:
    differences = [0.3, -0.1, 0.4, 0.2, 0.5]
    lower = upper_bound(differences, 1 - 0.03)
    assert p_greater(differences, lower) == pytest.approx(0.03)
    assert p_greater(differences, lower - 0.01) < 0.03 < p_greater(differences, lower + 0.01)
    assert t_quantile(0.0, 3) == -math.inf and t_quantile(1.0, 3) == math.inf


def test_equal_differences_have_no_scatter() -> None:
    assert p_greater([0.5, 0.5, 0.5], 0.25) == 0.0 and p_greater([0.5, 0.5, 0.5], 0.5) == 1.0
    assert upper_bound([0.5, 0.5, 0.5], 0.01) == 0.5


@pytest.mark.parametrize(("effect", "pairs", "level"), [(1.0, 3, 0.05), (1.4, 12, 0.005), (0.5, 20, 0.01)])
def test_power_is_the_share_of_simulated_tests(effect: float, pairs: int, level: float) -> None:
    generator = np.random.default_rng(pairs)
    draws = effect + generator.standard_normal((200_000, pairs))
    t = draws.mean(axis=1) / draws.std(axis=1, ddof=1) * math.sqrt(pairs)
    assert power(effect, pairs, level) == pytest.approx((t > t_quantile(1 - level, pairs - 1)).mean(), abs=0.005)
    assert power(0.0, pairs, level) == pytest.approx(level, rel=1e-3)


@given(st.lists(st.integers(3, 60), min_size=1, max_size=8), st.integers(3, 40))
def test_the_levels_of_all_looks_add_up_to_no_more_than_the_level(pairs: list[int], max_pairs: int) -> None:
    levels: list[float] = []
    for count in pairs:  # in any order, also beyond the largest number
        levels.append(level_left(count, max_pairs, 0.01, sum(levels)))
    allowed = [0.01 * min(1, count / max_pairs) for count in accumulate(pairs, max)]
    assert list(accumulate(levels)) == pytest.approx(allowed)


@settings(max_examples=20)
@given(st.floats(0.2, 3), st.floats(0.2, 3), st.integers(3, 12))
def test_the_number_of_pairs_is_the_smallest_that_is_enough(first: float, second: float, pairs: int) -> None:
    spent = level_left(pairs, 24, 0.01, 0.0)
    needed = pairs_needed([first, second], pairs, 24, 0.01, spent)
    assert needed is not None and needed > pairs

    def found(count: int) -> float:
        return math.prod(power(effect, count, level_left(count, 24, 0.01, spent)) for effect in (first, second))

    assert found(needed) >= 0.8
    assert needed == pairs + 1 or found(needed - 1) < 0.8


def test_no_number_of_pairs_is_enough_without_an_effect_or_a_level() -> None:
    assert pairs_needed([2.0, 0.01], 3, 24, 0.01, 0.00125) is None
    assert pairs_needed([2.0, 2.0], 24, 24, 0.01, 0.01) is None
    assert power(0.01, MAX_PAIRS, 0.01) < 0.8
