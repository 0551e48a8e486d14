"""The law of a mixture: the design of its trainings, the fit, and the best weights."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate.mixture_law import (
    MixtureLaw,
    design_weights,
    find_best_weights,
    fit_mixture_law,
    leave_one_out,
)

PLANTED = MixtureLaw([1.1, 0.6, 1.9], [[2.5, 0.4, 0.2], [0.1, 1.5, 0.0], [0.3, 0.3, 6.0]], [0.3, 0.5, 0.25])
FEW_EXAMPLES = settings(deadline=None, max_examples=20)


@FEW_EXAMPLES
@given(runs=st.integers(1, 40), sources=st.integers(2, 8), part=st.floats(0, 0.9))
def test_the_design_is_on_the_simplex_and_above_the_lowest_weight(runs: int, sources: int, part: float) -> None:
    design = np.array(design_weights(runs, sources, part / sources))
    assert design.shape == (runs, sources)
    assert np.abs(design.sum(axis=1) - 1).max() < 1e-3
    assert design.min() > part / sources - 1e-4
    assert np.allclose(design[0], 1 / sources, atol=1e-4)
    assert len(np.unique(design, axis=0)) == runs


def test_the_design_fills_the_simplex_more_evenly_than_random_draws() -> None:
    """By the largest distance of any point of the simplex to the next run."""
    places = np.array([(a, b, 20 - a - b) for a in range(21) for b in range(21 - a)]) / 20

    def largest_hole(design: np.ndarray) -> float:
        return float(np.linalg.norm(places[:, None] - design, axis=2).min(axis=1).max())

    random = [np.random.default_rng(seed).dirichlet(np.ones(3), 32) for seed in range(20)]
    assert largest_hole(np.array(design_weights(32, 3, 0.0))) < np.quantile(
        [largest_hole(draw) for draw in random], 0.2
    )


def test_a_fit_recovers_a_planted_law() -> None:
    weights = np.array(design_weights(16, 3, 0.02))
    law = fit_mixture_law(weights, PLANTED.predict(weights))
    others = np.array(design_weights(100, 3, 0.02))
    assert np.abs(law.predict(others) / PLANTED.predict(others) - 1).max() < 1e-3
    assert np.allclose(law.irreducible, PLANTED.irreducible, atol=0.1)
    assert np.allclose(law.exponents, PLANTED.exponents, atol=0.03)
    left_out = leave_one_out(weights, PLANTED.predict(weights), np.ones(16))
    assert np.abs(left_out / PLANTED.predict(weights) - 1).max() < 1e-3


def test_a_fit_to_several_lengths_predicts_longer_trainings() -> None:
    weights, lengths = np.array(design_weights(16, 3, 0.02)), np.resize([0.25, 0.5, 1], 16)
    losses = np.array([PLANTED.at(length).predict(row) for row, length in zip(weights, lengths, strict=True)])
    law = fit_mixture_law(weights, losses, lengths)
    others = np.array(design_weights(100, 3, 0.02))
    assert np.abs(law.at(4).predict(others) / PLANTED.at(4).predict(others) - 1).max() < 1e-3
    assert np.allclose(law.exponents, PLANTED.exponents, atol=0.03)
    assert np.abs(leave_one_out(weights, losses, lengths) / losses - 1).max() < 1e-3


def test_a_law_at_another_length_has_the_same_irreducible_losses() -> None:
    weights = np.array(design_weights(5, 3, 0.02))
    rest = PLANTED.predict(weights) - PLANTED.irreducible
    longer = PLANTED.at(4).predict(weights) - PLANTED.irreducible
    assert np.allclose(longer, rest * 4.0 ** -np.array(PLANTED.exponents))


def test_a_fit_through_noise_predicts_the_planted_law() -> None:
    weights = np.array(design_weights(16, 3, 0.02))
    noise = np.random.default_rng(1).normal(1, 0.002, (16, 3))
    law = fit_mixture_law(weights, PLANTED.predict(weights) * noise)
    others = np.array(design_weights(100, 3, 0.02))
    assert np.abs(law.predict(others) / PLANTED.predict(others) - 1).mean() < 0.003


def test_too_few_runs_are_a_user_error() -> None:
    weights = np.array(design_weights(5, 3, 0.02))
    with pytest.raises(UserError, match=r"needs 6 finished trainings; there are 5\. Raise mixture\.runs"):
        fit_mixture_law(weights, PLANTED.predict(weights))


@FEW_EXAMPLES
@given(
    st.lists(st.lists(st.floats(0.01, 9), min_size=3, max_size=3), min_size=2, max_size=3),
    st.lists(st.floats(0.05, 2), min_size=3, max_size=3),
    st.lists(st.floats(0.2, 1), min_size=3, max_size=3),
    st.floats(0, 0.15),
)
def test_the_best_weights_are_those_of_a_grid(
    worths: list[list[float]], exponents: list[float], high: list[float], low: float
) -> None:
    """The reference tries all weights in steps of 1 / 60."""
    law = MixtureLaw([0.5] * len(worths), worths, exponents[: len(worths)])
    target = np.arange(1, len(worths) + 1) / 3
    lows, highs = np.full(3, low), np.array(high)
    if highs.sum() < 1.1:
        return
    best = find_best_weights(law, target.tolist(), lows, highs)
    assert best.sum() == pytest.approx(1, abs=1e-9)
    assert (best <= highs + 1e-9).all() and (best >= np.minimum(lows, highs) - 1e-9).all()
    grid = np.array([(a, b, 60 - a - b) for a, b in itertools.product(range(61), repeat=2) if a + b <= 60]) / 60
    allowed = grid[((grid <= highs) & (grid >= np.minimum(lows, highs))).all(axis=1)]
    values = law.predict(allowed) @ target
    assert float(law.predict(best) @ target) <= values.min(initial=np.inf) + 1e-9


def test_limits_that_allow_too_little_are_a_user_error() -> None:
    with pytest.raises(UserError, match=r"allow 60 % of the tokens of mixture\.target_tokens\. Raise a max_epochs"):
        find_best_weights(PLANTED, [1, 1, 1], np.zeros(3), np.full(3, 0.2))
