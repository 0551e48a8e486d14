"""Fits of data with known exponents."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.law_coverage import best, draw_sweep
from lm.common.errors import UserError
from lm.experiments.scaling_law import Measurement, fit_parabola, fit_power_law, fit_scaling_law, predict

BUDGETS = (3e12, 1e13, 3e13)


def measure(
    a: float, c: float, noise: float = 0.0, seed: int = 0, budgets: tuple[float, ...] = BUDGETS
) -> list[Measurement]:
    """Losses whose best size is ``0.1 · C^a`` and whose best loss is ``9 · C^-c``."""
    generator = np.random.default_rng(seed)
    runs = []
    for budget, factor in product(budgets, (0.25, 0.5, 1.1, 2.0, 4.0)):
        parameters = 0.1 * budget**a * factor
        loss = 9 * budget**-c + 0.05 * math.log(factor) ** 2 + noise * generator.standard_normal()
        runs.append(Measurement(budget, parameters, budget / (6 * parameters), loss))
    return runs


@given(st.floats(0.2, 0.8), st.floats(0.01, 0.2))
def test_exponents_of_exact_data_are_found(a: float, c: float) -> None:
    runs = measure(a, c)
    law = fit_scaling_law(runs)
    assert law.parameters.exponent == pytest.approx(a, abs=1e-6)
    assert law.tokens.exponent == pytest.approx(1 - a, abs=1e-6)
    assert law.loss.exponent == pytest.approx(-c, abs=1e-6)
    assert law.parameters(1e14) == pytest.approx(0.1 * 1e14**a, rel=1e-4)
    prediction = predict(runs, law, 3e14)
    assert prediction.loss == pytest.approx(9 * 3e14**-c, rel=1e-5)
    assert prediction.low <= prediction.loss * (1 + 1e-6)
    assert prediction.high >= prediction.loss * (1 - 1e-6)


def test_noise_gives_errors_that_cover_the_truth() -> None:
    covered, inside = 0, 0
    for seed in range(20):
        runs = measure(0.5, 0.05, noise=0.005, seed=seed)
        law = fit_scaling_law(runs)
        assert 0 < law.parameters.exponent_error < 0.2
        covered += abs(law.parameters.exponent - 0.5) < 2.5 * law.parameters.exponent_error
        prediction = predict(runs, law, 3e14)
        assert prediction.low < prediction.loss < prediction.high
        inside += prediction.low <= 9 * 3e14**-0.05 <= prediction.high
    assert covered >= 17
    assert inside >= 17


@pytest.mark.slow
@pytest.mark.parametrize(
    ("irreducible", "draws", "budgets"), [(1.69, 10, 4), (0.0, 5, 4), (1.0, 5, 4), (1.69, 5, 5)], ids=str
)
def test_the_interval_covers_the_truth_with_an_irreducible_loss_from_four_budgets_on(
    irreducible: float, draws: int, budgets: int
) -> None:
    flops = [1e17 * 10 ** (index / 2) for index in range(budgets)]
    truth = best(10 * flops[-1], irreducible)[0]
    covered = 0
    for seed in range(draws):
        runs = draw_sweep(flops, irreducible, seed)
        prediction = predict(runs, fit_scaling_law(runs), 10 * flops[-1])
        covered += prediction.low <= truth <= prediction.high
        assert prediction.high - prediction.low < 0.15 * truth
    assert covered >= draws - 1


@pytest.mark.parametrize(("irreducible", "alpha"), [(1.7, 0.15), (0.4, 0.5), (0.0, 0.05)])
def test_the_irreducible_loss_of_exact_data_is_found(irreducible: float, alpha: float) -> None:
    runs = [replace(run, loss=run.loss + irreducible) for run in measure(0.5, alpha, budgets=(1e12, 3e12, 1e13, 3e13))]
    law = fit_scaling_law(runs)
    truth = irreducible + 9 * 3e14**-alpha
    assert law.irreducible_loss == pytest.approx(irreducible, abs=0.01)
    assert law.loss.exponent == pytest.approx(-alpha, rel=0.02)
    assert predict(runs, law, 3e14).loss == law.predict_loss(3e14) == pytest.approx(truth, rel=1e-3)
    assert fit_scaling_law([run for run in runs if run.budget > 1e12]).irreducible_loss == 0, "three do not show it"


def test_the_minimum_of_a_parabola() -> None:
    inside = fit_parabola(measure(0.5, 0.05)[:5])
    assert inside.is_inside
    assert inside(inside.best_parameters) == inside.best_loss


def test_a_minimum_outside_the_sizes_is_marked() -> None:
    runs = [Measurement(1e12, size, 1e6, math.log(size / 1e6) ** 2) for size in (1e3, 1e4, 1e5)]
    parabola = fit_parabola(runs)
    assert not parabola.is_inside
    assert parabola.best_parameters == pytest.approx(1e6)


def test_a_prediction_lies_in_its_interval() -> None:
    """Sizes on one side of the minimum, so that many draws have none: they would all lie on one side of the fit."""
    sizes, generator = (1e5, 1.2e5, 1.5e5, 2e5), np.random.default_rng(0)
    outside = 0
    for _ in range(300):
        noise = generator.standard_normal((2, len(sizes)))
        runs = [
            Measurement(
                budget, size, budget / (6 * size), 2 + 0.05 * math.log(size / 9e4) ** 2 + 0.006 * noise[row, column]
            )
            for row, budget in enumerate((1e12, 1e13))
            for column, size in enumerate(sizes)
        ]
        try:
            prediction = predict(runs, fit_scaling_law(runs), 1e15)
        except UserError:  # no minimum
            continue
        outside += prediction.loss in (prediction.low, prediction.high)
        assert prediction.low <= prediction.loss <= prediction.high
    assert outside, "the fits include some whose draws lie beside the prediction"


def test_the_error_of_a_power_law_is_that_of_a_line() -> None:
    x = np.array([1.0, 2.0, 5.0, 9.0])
    y = 3 * x**0.7 * np.array([1.01, 0.98, 1.02, 0.99])
    law = fit_power_law(x, y)
    _, covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    assert law.exponent == pytest.approx(np.polyfit(np.log(x), np.log(y), 1)[0])
    assert law.exponent_error == pytest.approx(math.sqrt(covariance[0, 0]))


def test_too_few_sizes_or_budgets_and_no_minimum_are_refused() -> None:
    with pytest.raises(UserError, match="2 sizes; a fit needs 3"):
        fit_scaling_law(
            [run for run in measure(0.5, 0.05) if run.budget != 1e13] + measure(0.5, 0.05, budgets=(1e13,))[:2]
        )
    with pytest.raises(UserError, match="at least two budgets"):
        fit_scaling_law(measure(0.5, 0.05, budgets=(1e13,)))
    with pytest.raises(UserError, match="no minimum"):
        fit_parabola([Measurement(1e12, size, 1e6, -(math.log(size / 1e4) ** 2)) for size in (1e3, 1e4, 1e5)])


def test_three_sizes_at_each_budget_tell_no_error() -> None:
    with pytest.raises(UserError, match="add a fourth"):
        fit_scaling_law([run for run in measure(0.5, 0.05) if run in measure(0.5, 0.05, budgets=(run.budget,))[1:4]])


def test_no_outlier_rules_the_error() -> None:
    """With noise as large as the parabola is deep, some draws have their minimum far away."""
    errors = [
        fit_scaling_law(measure(0.5, 0.05, noise=0.02, seed=seed)).parameters.exponent_error for seed in range(10)
    ]
    assert max(errors) < 0.5


@pytest.mark.parametrize("last", [1.8001, 1.801, 1.802])
def test_losses_that_fall_nearly_in_a_line_have_no_minimum(last: float) -> None:
    sizes = (1e4, 2e4, 4e4)
    runs = [
        Measurement(budget, size, budget / (6 * size), loss - shift)
        for budget, shift in ((1e12, 0.0), (3e12, 0.2))
        for size, loss in zip(sizes, (2.0, 1.9, last), strict=True)
    ]
    with pytest.raises(UserError, match="no minimum near these sizes; add smaller and larger sizes"):
        fit_scaling_law(runs)
