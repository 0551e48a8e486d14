"""The best weights of a mixture: a design of small trainings, a law of their losses, and its minimum.

The law of the validation loss of each source is a power law in the tokens that count for it:

    loss = irreducible + (length · sum over the sources j of worth_j · weight_j) ** -exponent

The length of a training is its number of tokens, as a multiple of some training's. A token of a source counts for the
loss of another one as much as it is worth there: the effective data of Hernandez et al. 2021 ("Scaling Laws for
Transfer") in the law of Hoffmann et al. 2022, for one model size. Unlike a loss whose logarithm is linear in the
weights (Ye et al. 2024, "Data Mixing Laws"), it is the same law for any length. It is convex in the weights, and so is
a weighted mean of several: its minimum on the simplex is found by projected gradients.

Legend: R runs, K sources (their weights), L losses (one for each validation text), G places of a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError

Array = npt.NDArray[np.float64]

_GAPS = np.geomspace(1e-3, 1, 40)  # of the lowest loss above the irreducible one, as a part of the lowest loss
_EXPONENTS = np.geomspace(0.05, 2, 24)
_SWEEPS = 100  # over the worths
_MAX_MOVES = 1000  # from the best place of the grid
_LEAST_WORTH = 1e-12  # of all sources together
_MAX_STEPS = 20_000
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class MixtureLaw:
    """The losses of a training of length 1 as functions of the weights of its sources."""

    irreducible: list[float]
    """(L,): the part of each loss that no training changes."""
    worths: list[list[float]]
    """(L, K): how much a token of each source counts for each loss."""
    exponents: list[float]
    """(L,): how fast the rest of each loss falls."""

    def predict(self, weights: Array) -> Array:
        """Return the losses of weights (..., K): (..., L)."""
        counted = np.maximum(weights @ np.asarray(self.worths).T, _LEAST_WORTH)
        return np.asarray(self.irreducible) + counted ** -np.asarray(self.exponents)

    def at(self, length: float) -> "MixtureLaw":
        """Return the law of trainings that are ``length`` times as long."""
        return replace(self, worths=(length * np.asarray(self.worths)).tolist())


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

    At a given irreducible loss and exponent, the tokens that count are linear in the worths, which are at least 0. Each
    of these equations counts by the slope of the loss there, so that errors count as errors of the loss. The
    irreducible loss and the exponent are searched on a grid, and then all parameters together. Raises UserError for
    fewer runs than one more than a loss has parameters.
    """
    runs, sources = weights_RK.shape
    if runs < (needed := runs_needed(sources)):
        raise UserError(
            f"A law of {sources} sources has {needed - 1} parameters and needs {needed} finished trainings; "
            f"there are {runs}. Raise mixture.runs."
        )
    lengths_R = np.ones(runs) if lengths_R is None else lengths_R
    fitted = [_fit_loss(weights_RK * lengths_R[:, None], losses_R) for losses_R in losses_RL.T]
    return MixtureLaw(
        [fit.irreducible for fit in fitted],
        [fit.worths_K.tolist() for fit in fitted],
        [fit.exponent for fit in fitted],
    )


def runs_needed(sources: int) -> int:
    """Return the fewest trainings that a law can be fitted to: one more than it has parameters for a loss."""
    return sources + 3


class _Fit(NamedTuple):
    error: float
    """Sum of the squared errors of the loss."""
    irreducible: float
    exponent: float
    worths_K: Array


def _fit_loss(tokens_RK: Array, losses_R: Array) -> _Fit:
    """Fit the law of a loss: the best place of a grid, and from there by Levenberg and Marquardt's method in the
    logarithms of the parameters."""
    lowest = float(losses_R.min())
    grid = np.array([(lowest * (1 - gap), exponent) for gap in _GAPS for exponent in _EXPONENTS])
    best, damping = _fit_worths(tokens_RK, losses_R, *grid.T), 1e-3
    for _ in range(_MAX_MOVES):
        counted_R = np.maximum(tokens_RK @ best.worths_K, _LEAST_WORTH)
        rest_R = counted_R**-best.exponent
        slopes_RP = np.column_stack(
            [
                np.full(len(losses_R), best.irreducible - lowest),
                -best.exponent * np.log(counted_R) * rest_R,
                -best.exponent * (rest_R / counted_R)[:, None] * tokens_RK * best.worths_K,
            ]
        )
        matrix_PP, errors_R = slopes_RP.T @ slopes_RP, losses_R - best.irreducible - rest_R
        damped_PP = matrix_PP + np.diag(damping * np.diagonal(matrix_PP) + _TOLERANCE)
        change_P = np.exp(np.clip(np.linalg.solve(damped_PP, slopes_RP.T @ errors_R), -1, 1))
        moved = _Fit(
            0.0,
            max(0.0, lowest - (lowest - best.irreducible) * float(change_P[0])),
            best.exponent * float(change_P[1]),
            best.worths_K * change_P[2:],
        )
        predicted_R = moved.irreducible + np.maximum(tokens_RK @ moved.worths_K, _LEAST_WORTH) ** -moved.exponent
        moved = moved._replace(error=float(((losses_R - predicted_R) ** 2).sum()))
        is_better = moved.error < best.error * (1 - _TOLERANCE)
        best, damping = (moved, damping / 3) if is_better else (best, damping * 4)
        if damping > 1e9:
            break
    return best


def _fit_worths(tokens_RK: Array, losses_R: Array, irreducible_G: Array, exponents_G: Array) -> _Fit:
    """Return the best fit of a grid of irreducible losses and exponents.

    Non-negative least squares by coordinate descent gives the worths.
    """
    rest_GR = losses_R - irreducible_G[:, None]
    counted_GR = rest_GR ** (-1 / exponents_G[:, None])
    slopes_GR = rest_GR / counted_GR  # times the exponent, which is the same for all runs
    terms_GRK = slopes_GR[:, :, None] * tokens_RK
    matrix_GKK = terms_GRK.transpose(0, 2, 1) @ terms_GRK
    right_GK = (terms_GRK * rest_GR[:, :, None]).sum(1)
    diagonal_GK = np.maximum(np.diagonal(matrix_GKK, axis1=1, axis2=2), 1e-300)
    worths_GK = np.zeros_like(right_GK)
    for _ in range(_SWEEPS):
        for k in range(tokens_RK.shape[1]):
            missing_G = right_GK[:, k] - (matrix_GKK[:, k] * worths_GK).sum(1)
            worths_GK[:, k] = np.maximum(worths_GK[:, k] + missing_G / diagonal_GK[:, k], 0)
    predicted_GR = np.maximum(worths_GK @ tokens_RK.T, _LEAST_WORTH) ** -exponents_G[:, None]
    errors_G = ((predicted_GR - rest_GR) ** 2).sum(1)
    best = int(np.nanargmin(errors_G))
    return _Fit(float(errors_G[best]), float(irreducible_G[best]), float(exponents_G[best]), worths_GK[best])


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
    factors, worths_LK, exponents_L = (np.asarray(part, float) for part in (target, law.worths, law.exponents))

    def value(weights: Array) -> float:
        return float(law.predict(weights) @ factors)

    weights = _project(np.full(len(low), 1 / len(low)), low, high)
    size = 1.0
    for _ in range(_MAX_STEPS):
        counted_L = np.maximum(worths_LK @ weights, _LEAST_WORTH)
        gradient = -(factors * exponents_L * counted_L ** (-exponents_L - 1)) @ worths_LK
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
