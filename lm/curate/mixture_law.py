"""The best weights of a mixture: a design of small trainings, a log-linear law of their losses, and its minimum.

The law of the validation loss of each source (Ye et al. 2024, "Data Mixing Laws"; also in Olmix, 2026) is

    loss = irreducible + length ** -exponent · exp(sum over the sources j of coefficient_j · weight_j)

where the length of a training is its number of tokens, as a multiple of some training's (the power law of Hoffmann et
al. 2022, for one model size). The weights add up to 1, so a factor before ``exp`` would be one coefficient too many:
another length only adds a number to all coefficients. Such a loss is convex in the weights, and so is a weighted mean
of several: its minimum on the simplex is found by projected gradients.

Legend: R runs, K sources (their weights), L losses (one for each validation text).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError

Array = npt.NDArray[np.float64]

_GAPS = np.geomspace(1e-3, 1, 120)  # of the lowest loss above the irreducible one, as a part of the lowest loss
_REFINEMENTS = 3
_MAX_STEPS = 20_000
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class MixtureLaw:
    """The losses of a training of length 1 as functions of the weights of its sources."""

    irreducible: list[float]
    """(L,): the part of each loss that no weights change."""
    coefficients: list[list[float]]
    """(L, K): by how much a weight changes the logarithm of the rest of a loss."""
    exponents: list[float]
    """(L,): how fast the rest of each loss falls with the length; 0 if it was fitted to trainings of one length."""

    def predict(self, weights: Array) -> Array:
        """Return the losses of weights (..., K): (..., L)."""
        return np.asarray(self.irreducible) + np.exp(weights @ np.asarray(self.coefficients).T)

    def at(self, length: float) -> "MixtureLaw":
        """Return the law of trainings that are ``length`` times as long."""
        shifts_L1 = math.log(length) * np.asarray(self.exponents)[:, None]
        return replace(self, coefficients=(np.asarray(self.coefficients) - shifts_L1).tolist())


def design_weights(runs: int, sources: int, min_weight: float) -> list[list[float]]:
    """Return weights (runs, sources) that fill the simplex evenly: equal weights, then a low-discrepancy sequence.

    The sequence is the one of the generalized golden ratio (Roberts 2018, "The unreasonable effectiveness of
    quasirandom sequences"), whose sorted coordinates divide the unit interval into the weights. No weight is below
    ``min_weight``. Each has four decimals.
    """
    ratio = 2.0  # the root above 1 of x ** sources = x + 1
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / sources)
    steps = ratio ** -np.arange(1, sources)
    points = [np.full(sources, 1 / sources)]
    for number in range(1, runs):
        cuts = np.sort((0.5 + number * steps) % 1)
        points.append(np.diff(cuts, prepend=0, append=1))
    return [[round(float(weight), 4) for weight in min_weight + (1 - sources * min_weight) * point] for point in points]


def fit_mixture_law(weights_RK: Array, losses_RL: Array, lengths_R: Array | None = None) -> MixtureLaw:
    """Fit the law by least squares of the losses. ``lengths_R``: of the trainings; default: all the same.

    At a given irreducible loss, the logarithm of the rest is linear in the weights and in the logarithm of the length.
    Each logarithm counts by the square of the rest, so that errors count as errors of the loss. The irreducible loss is
    searched, from 0 up to a little less than the lowest loss. Raises UserError for fewer runs than one more than a loss
    has parameters.
    """
    runs, sources = weights_RK.shape
    lengths_R = np.ones(runs) if lengths_R is None else lengths_R
    if runs < (needed := runs_needed(sources, len(np.unique(lengths_R)))):
        raise UserError(
            f"A law of {sources} sources has {needed - 1} parameters and needs {needed} finished trainings; "
            f"there are {runs}. Raise mixture.runs."
        )
    terms = np.column_stack([weights_RK, -np.log(lengths_R)])
    fitted = [_fit_loss(terms, losses_R) for losses_R in losses_RL.T]
    return MixtureLaw(
        [offset for offset, _ in fitted],
        [factors[:-1].tolist() for _, factors in fitted],
        [float(factors[-1]) for _, factors in fitted],
    )


def runs_needed(sources: int, lengths: int = 1) -> int:
    """Return the fewest trainings that a law can be fitted to: one more than it has parameters for a loss."""
    return sources + 2 + (lengths > 1)


def _fit_loss(terms_RT: Array, losses_R: Array) -> tuple[float, Array]:
    """Return the irreducible loss, and the factors of the terms of the exponent: the weights and the length."""
    lowest = float(losses_R.min())
    gaps, step = _GAPS, math.log(_GAPS[1] / _GAPS[0])
    best: tuple[float, float, Array] = (math.inf, 0.0, np.zeros(terms_RT.shape[1]))
    for _ in range(_REFINEMENTS):
        for gap in gaps[gaps <= 1]:
            best = min(best, _fit_rest(terms_RT, losses_R, lowest * (1 - float(gap))), key=lambda fit: fit[0])
        gaps = max(1 - best[1] / lowest, _GAPS[0]) * np.exp(np.linspace(-step, step, 21))
        step /= 10
    return best[1], best[2]


def _fit_rest(terms_RT: Array, losses_R: Array, irreducible: float) -> tuple[float, float, Array]:
    """Return the sum of squared errors of the best factors for an irreducible loss, that loss, and them."""
    rest = losses_R - irreducible
    solution = np.linalg.lstsq(terms_RT * rest[:, None], np.log(rest) * rest, rcond=None)[0]
    factors = np.asarray(solution, np.float64)  # the smallest ones: 0 for the length if it never differs
    with np.errstate(over="ignore"):
        errors = np.exp(terms_RT @ factors) - rest
    return float((errors**2).sum()), irreducible, factors


def leave_one_out(weights_RK: Array, losses_RL: Array, lengths_R: Array) -> Array:
    """Return the losses (R, L) that laws of all other runs predict for each run.

    Raises UserError as :func:`fit_mixture_law` does, for one run less.
    """
    predicted = []
    for run, length in enumerate(lengths_R):
        weights, losses, lengths = (np.delete(values, run, axis=0) for values in (weights_RK, losses_RL, lengths_R))
        predicted.append(fit_mixture_law(weights, losses, lengths).at(float(length)).predict(weights_RK[run]))
    return np.array(predicted)


def find_best_weights(law: MixtureLaw, target: Sequence[float], low: Array, high: Array) -> Array:
    """Return the weights (K,) with the lowest mean of the losses, each times its number in ``target`` (L,).

    The weights add up to 1 and lie between ``low`` and ``high`` (K,) each. Raises UserError if none do.
    """
    if high.sum() < 1:
        raise UserError(
            f"The limits of epochs allow {100 * high.sum():.3g} % of the tokens of mixture.target_tokens. Raise a "
            "max_epochs of data.mix, leave one out, or lower mixture.target_tokens."
        )
    low = np.minimum(low, high)
    factors, coefficients = np.asarray(target, float), np.asarray(law.coefficients)

    def value(weights: Array) -> float:
        return float(law.predict(weights) @ factors)

    weights = _project(np.full(len(low), 1 / len(low)), low, high)
    size = 1.0
    for _ in range(_MAX_STEPS):
        gradient = (factors * np.exp(coefficients @ weights)) @ coefficients
        moved = _project(weights - size * gradient, low, high)
        while value(moved) > value(weights) + gradient @ (moved - weights) + ((moved - weights) ** 2).sum() / (
            2 * size
        ):
            size /= 2
            moved = _project(weights - size * gradient, low, high)
            if size < _TOLERANCE:
                return weights
        change = float(np.abs(moved - weights).max())
        weights, size = moved, size * 1.5
        if change < _TOLERANCE:
            break
    return weights


def _project(point: Array, low: Array, high: Array) -> Array:
    """Return the nearest weights that add up to 1 and lie between ``low`` and ``high``, by bisection of a shift."""
    first, last = float((low - point).min()), float((high - point).max())
    for _ in range(200):
        middle = (first + last) / 2
        if np.clip(point + middle, low, high).sum() < 1:
            first = middle
        else:
            last = middle
    return np.clip(point + last, low, high)
