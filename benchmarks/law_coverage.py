"""Count how often the interval of a predicted loss holds the true loss, in simulated sweeps.

``python -m benchmarks.law_coverage [--draws 1000]``. A draw has trainings of five sizes at each budget, whose losses
are those of the surface of Hoffmann et al. 2022 (equation 10), with its irreducible loss or without one, and noise. The
law of the minima and that of the surface are fitted to them, and predict the loss at ten times the largest budget.
Prints JSON: for each case the draws whose 95 % interval holds the true loss, those whose interval is above it, those
without a law, because a budget has no minimum, and the median width of the interval in percent of the loss.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from lm.common.errors import UserError
from lm.experiments.loss_surface import fit_loss_surface, predict_by_surface
from lm.experiments.scaling_law import Measurement, Prediction, fit_scaling_law, predict

_NOISE = 0.003  # standard deviation of a loss, relative
_SIZES = np.geomspace(1 / 3, 3, 5)  # over the best size
_IRREDUCIBLE = 1.69


def surface(parameters: Any, budget: float, irreducible: float) -> Any:
    """Return the loss of models of these sizes at a budget in FLOPs."""
    return irreducible + 406.4 / parameters**0.34 + 410.7 / (budget / 6 / parameters) ** 0.28


def best(budget: float, irreducible: float) -> tuple[float, float]:
    """Return the lowest loss of a budget, and the size that has it."""
    sizes = np.geomspace(1e5, 1e12, 20_001)
    losses = surface(sizes, budget, irreducible)
    return float(losses.min()), float(sizes[losses.argmin()])


def draw_sweep(budgets: list[float], irreducible: float, seed: int) -> list[Measurement]:
    """Return the losses of a sweep. The sizes of a budget lie around its best one, but not exactly."""
    generator, runs = np.random.default_rng(seed), []
    for budget in budgets:
        sizes = best(budget, irreducible)[1] * _SIZES * math.exp(generator.uniform(-0.3, 0.3))
        losses = surface(sizes, budget, irreducible) * (1 + _NOISE * generator.standard_normal(len(sizes)))
        runs += [Measurement(budget, *run) for run in zip(sizes, budget / 6 / sizes, losses, strict=True)]
    return runs


def by_minima(runs: Sequence[Measurement], budget: float) -> Prediction:
    """Predict by the law of the minima."""
    return predict(runs, fit_scaling_law(runs), budget)


def by_surface(runs: Sequence[Measurement], budget: float) -> Prediction:
    """Predict by the surface of all trainings."""
    return predict_by_surface(runs, fit_loss_surface(runs), budget)


def count(
    predict_loss: Callable[[Sequence[Measurement], float], Prediction],
    budgets: list[float],
    irreducible: float,
    draws: int,
) -> dict[str, Any]:
    """Return the figures of one case."""
    target = 10 * budgets[-1]
    truth = best(target, irreducible)[0]
    held = above = 0
    widths = []
    for seed in range(draws):
        runs = draw_sweep(budgets, irreducible, seed)
        try:
            prediction = predict_loss(runs, target)
        except UserError:
            continue
        held += prediction.low <= truth <= prediction.high
        above += truth < prediction.low
        widths.append(100 * (prediction.high - prediction.low) / truth)
    return {
        "law": predict_loss.__name__.replace("_", " "),
        "budgets": len(budgets),
        "irreducible loss": irreducible,
        "held": held,
        "above": above,
        "no law": draws - len(widths),
        "median width, %": round(median(widths), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    draws = parser.parse_args().draws
    for predict_loss, irreducible, number in product((by_minima, by_surface), (_IRREDUCIBLE, 0.0), (4, 5)):
        budgets = [1e17 * 10 ** (index / 2) for index in range(number)]
        print(json.dumps(count(predict_loss, budgets, irreducible, draws)), flush=True)


if __name__ == "__main__":
    main()
