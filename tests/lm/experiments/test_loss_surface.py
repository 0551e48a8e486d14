"""Fits of the loss over parameters and tokens to data of known surfaces."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.law_coverage import best, draw_sweep
from lm.common.errors import UserError
from lm.experiments.loss_surface import LossSurface, fit_loss_surface, predict_by_surface
from lm.experiments.scaling_law import Measurement

BUDGETS = [1e17 * 10 ** (index / 2) for index in range(4)]


def measure(irreducible: float, alpha: float, beta: float) -> list[Measurement]:
    """Losses without noise."""
    runs = []
    for budget, factor in product(BUDGETS, (0.25, 0.5, 1.0, 2.0, 4.0)):
        parameters = factor * math.sqrt(budget / 120)
        tokens = budget / (6 * parameters)
        loss = irreducible + (parameters / 1e8) ** -alpha + 0.8 * (tokens / 1e9) ** -beta
        runs.append(Measurement(budget, parameters, tokens, loss))
    return runs


@given(st.floats(0.0, 3.0), st.floats(0.1, 0.9), st.floats(0.1, 0.9))
def test_exact_data_are_found(irreducible: float, alpha: float, beta: float) -> None:
    runs = measure(irreducible, alpha, beta)
    surface = fit_loss_surface(runs)
    for run in runs:
        assert surface(run.parameters, run.tokens) == pytest.approx(run.loss, rel=1e-3)
    assert surface.flops_per_product == pytest.approx(6)
    assert surface.irreducible_loss == pytest.approx(irreducible, abs=0.1)
    assert surface.parameter_exponent == pytest.approx(alpha, rel=0.1)
    assert surface.token_exponent == pytest.approx(beta, rel=0.1)


@given(st.integers(0, 1000))
def test_no_surface_of_a_fine_grid_fits_better(seed: int) -> None:
    runs = draw_sweep(BUDGETS, 1.69, seed)
    surface = fit_loss_surface(runs)
    losses = np.array([run.loss for run in runs])
    sizes, texts = (np.array(values) for values in zip(*((run.parameters, run.tokens) for run in runs), strict=True))
    fitted = np.array([surface(run.parameters, run.tokens) for run in runs])
    error = ((fitted / losses - 1) ** 2).sum()
    assert surface.noise == pytest.approx(math.sqrt(error / (len(runs) - 5)), rel=1e-6)
    for alpha, beta in product(np.linspace(0.05, 1.2, 12), repeat=2):
        terms = np.stack((np.ones(len(runs)), (sizes / 1e8) ** -alpha, (texts / 1e10) ** -beta), 1) / losses[:, None]
        scales, *_ = np.linalg.lstsq(terms, np.ones(len(runs)), rcond=None)
        if (scales >= 0).all():
            assert error <= ((terms @ scales - 1) ** 2).sum() * (1 + 1e-6)


@given(st.floats(0.1, 0.9), st.floats(0.1, 0.9), st.floats(0.1, 3.0), st.floats(15, 20))
def test_the_best_size_of_a_budget_has_the_lowest_loss(alpha: float, beta: float, ratio: float, budget: float) -> None:
    surface = LossSurface(1.0, ratio, alpha, 1.0, beta, 1e7, 1e9, 6.0, 0.0)
    parameters = surface.best_parameters(10**budget)
    losses = [surface(n, 10**budget / (6 * n)) for n in (parameters, 0.99 * parameters, 1.01 * parameters)]
    assert losses[0] == min(losses)


@pytest.mark.slow
def test_the_interval_covers_the_truth() -> None:
    target = 10 * BUDGETS[-1]
    truth, covered = best(target, 1.69)[0], 0
    for seed in range(20):
        runs = draw_sweep(BUDGETS, 1.69, seed)
        prediction = predict_by_surface(runs, fit_loss_surface(runs), target)
        assert prediction.low < prediction.loss < prediction.high
        assert prediction.loss == pytest.approx(truth, rel=0.05)
        covered += prediction.low <= truth <= prediction.high
    assert covered >= 17


def test_too_few_trainings_and_a_loss_that_rises_are_refused() -> None:
    runs = measure(1.0, 0.3, 0.3)
    with pytest.raises(UserError, match="needs 6 trainings, and the sweep has 5"):
        fit_loss_surface(runs[:5])
    rising = [Measurement(run.budget, run.parameters, run.tokens, 1 + 1e-8 * run.parameters) for run in runs]
    with pytest.raises(UserError, match="do not fall with both the parameters and the tokens"):
        fit_loss_surface(rising)
