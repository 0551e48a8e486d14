"""The loss over parameters and tokens, ``E + A · N^-alpha + B · D^-beta``: approach 3 of Hoffmann et al. 2022.

It is fitted to all trainings of a sweep at once, not to the best of each budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm.common.errors import UserError
from lm.experiments.scaling_law import Array, Measurement, Prediction

_DRAWS = 300  # of the bootstrap
_SEED = 0
_EXPONENTS = np.geomspace(0.03, 1.5, 20)  # that are tried for alpha and for beta; none is beyond them
_STEPS = 80  # of the search from the best exponents of the grid
_FITTED = 5  # numbers that describe a surface


@dataclass(frozen=True)
class LossSurface:
    """A fitted surface. Its scales are the losses ``A · N^-alpha`` and ``B · D^-beta`` of the middle of the sweep."""

    irreducible_loss: float
    """E: no model and no text goes below it."""
    parameter_scale: float
    parameter_exponent: float
    """alpha."""
    token_scale: float
    token_exponent: float
    """beta."""
    middle_parameters: float
    middle_tokens: float
    flops_per_product: float
    """FLOPs of a training over parameters · tokens, about 6."""
    noise: float
    """Standard deviation of the losses around the surface, relative."""

    def __call__(self, parameters: float, tokens: float) -> float:
        """Return the loss of a training."""
        of_size = self.parameter_scale * (parameters / self.middle_parameters) ** -self.parameter_exponent
        of_text = self.token_scale * (tokens / self.middle_tokens) ** -self.token_exponent
        return self.irreducible_loss + of_size + of_text

    def best_parameters(self, budget: float) -> float:
        """Return the number of parameters with the lowest loss at a budget in FLOPs."""
        alpha, beta = self.parameter_exponent, self.token_exponent
        # With n and d over the middle, n · d is given, and alpha · A · n^-alpha = beta · B · d^-beta.
        product = budget / (self.flops_per_product * self.middle_parameters * self.middle_tokens)
        ratio = alpha * self.parameter_scale / (beta * self.token_scale)
        return self.middle_parameters * float((ratio * product**beta) ** (1 / (alpha + beta)))


def fit_loss_surface(runs: Sequence[Measurement]) -> LossSurface:
    """Fit a surface by least squares in relative loss, with E, A and B of 0 or more.

    Raises UserError for too few trainings, or if the loss does not fall with both parameters and tokens.
    """
    if len(runs) <= _FITTED:
        raise UserError(f"A surface of the loss needs {_FITTED + 1} trainings, and the sweep has {len(runs)}.")
    losses = np.array([[run.loss for run in runs]])
    scales, exponents, errors = _fit(_log_distances(runs), losses / losses)
    if not np.isfinite(errors[0]):
        raise UserError("The losses do not fall with both the parameters and the tokens; add other sizes and budgets.")
    return _surface(runs, scales[0], exponents[0], math.sqrt(float(errors[0]) / (len(runs) - _FITTED)))


def predict_by_surface(runs: Sequence[Measurement], surface: LossSurface, budget: float) -> Prediction:
    """Predict the best loss of a budget in FLOPs, with its 95 % interval by a bootstrap of the noise.

    Raises UserError if no draw of the bootstrap has a surface.
    """
    generator = np.random.default_rng(_SEED)
    expected = np.array([surface(run.parameters, run.tokens) for run in runs])
    losses = np.array([run.loss for run in runs])
    free = len(runs) - _FITTED
    # The noise is known from few losses only, so each draw has another one.
    noises = surface.noise * np.sqrt(free / generator.chisquare(free, (_DRAWS, 1)))
    drawn = expected * (1 + noises * generator.standard_normal((_DRAWS, len(runs))))
    scales, exponents, errors = _fit(_log_distances(runs), drawn / losses)
    found = [
        _best_loss(_surface(runs, scales[row], exponents[row], 0.0), budget) for row in np.flatnonzero(errors < np.inf)
    ]
    if not found:
        raise UserError("The losses are too noisy for a surface; add other sizes and budgets.")
    loss = _best_loss(surface, budget)
    low, high = np.percentile(found, (2.5, 97.5))
    parameters = surface.best_parameters(budget)
    tokens = budget / (surface.flops_per_product * parameters)
    # The draws are on one side of the fit if that has an E near its limit, 0; the truth may be on the other.
    reach = max(loss - float(low), float(high) - loss)
    return Prediction(budget, parameters, tokens, loss, loss - reach, loss + reach)


def _best_loss(surface: LossSurface, budget: float) -> float:
    parameters = surface.best_parameters(budget)
    return surface(parameters, budget / (surface.flops_per_product * parameters))


def _surface(runs: Sequence[Measurement], scales: Array, exponents: Array, noise: float) -> LossSurface:
    irreducible, of_size, of_text = map(float, scales)
    alpha, beta = map(float, exponents)
    sizes, texts = (math.exp(sum(map(math.log, values)) / len(runs)) for values in _sizes(runs))
    product = math.exp(sum(math.log(run.budget / (run.parameters * run.tokens)) for run in runs) / len(runs))
    return LossSurface(irreducible, of_size, alpha, of_text, beta, sizes, texts, product, noise)


def _sizes(runs: Sequence[Measurement]) -> tuple[list[float], list[float]]:
    return [run.parameters for run in runs], [run.tokens for run in runs]


def _log_distances(runs: Sequence[Measurement]) -> tuple[Array, Array, Array]:
    """Return ln parameters and ln tokens from their means, and the losses by which each equation is divided: (N,)."""
    parameters, tokens = (np.log(values) for values in _sizes(runs))
    return parameters - parameters.mean(), tokens - tokens.mean(), np.array([run.loss for run in runs])


def _fit(points: tuple[Array, Array, Array], targets: Array) -> tuple[Array, Array, Array]:
    """Fit surfaces to relative losses (draws, N): (E, A, B) (draws, 3), exponents (draws, 2), squared errors (draws,).

    At given exponents the other numbers are those of least squares. The exponents are searched on a grid. From the best
    of each draw, the search goes to the best of eight neighbors, then farther; if none is better, half as far. The
    error is infinite if no surface falls in both directions.
    """
    grid = np.stack(np.meshgrid(_EXPONENTS, _EXPONENTS), axis=-1).reshape(1, -1, 2)
    scales, exponents, errors = _choose(points, targets, grid)
    distances = np.full((len(targets), 1, 1), math.log(_EXPONENTS[1] / _EXPONENTS[0]))
    around = np.stack(np.meshgrid(*[(-1.0, 0.0, 1.0)] * 2), axis=-1).reshape(1, -1, 2)
    for _ in range(_STEPS):
        before = errors
        neighbors = np.clip(exponents[:, None] * np.exp(distances * around), _EXPONENTS[0], _EXPONENTS[-1])
        scales, exponents, errors = _choose(points, targets, neighbors)
        distances = distances * np.where(errors < before, 1.5, 0.5)[:, None, None]
    return scales, exponents, errors


def _choose(points: tuple[Array, Array, Array], targets: Array, exponents: Array) -> tuple[Array, Array, Array]:
    """Return the best of the surfaces with one of the exponents (1 or draws, candidates, 2) for each draw."""
    parameters, tokens, losses = points
    alphas, betas = exponents[..., :1], exponents[..., 1:]
    terms = (np.ones_like(alphas * parameters), np.exp(-alphas * parameters), np.exp(-betas * tokens))
    design = np.stack(terms, axis=-1) / losses[:, None]  # (1 or draws, candidates, N, 3)
    scales, errors = _least_squares(design, targets)
    without_offset, other_errors = _least_squares(design[..., 1:], targets)
    is_below = scales[..., 0] < 0
    scales = np.where(is_below[..., None], np.insert(without_offset, 0, 0.0, axis=-1), scales)
    errors = np.where(is_below, other_errors, errors)
    errors = np.where((scales[..., 1:] > 0).all(axis=-1), errors, np.inf)
    chosen = errors.argmin(axis=1)[:, None]
    exponents = np.broadcast_to(exponents, (*errors.shape, 2))
    scales, exponents = (np.take_along_axis(part, chosen[..., None], 1)[:, 0] for part in (scales, exponents))
    return scales, exponents, np.take_along_axis(errors, chosen, 1)[:, 0]


def _least_squares(design: Array, targets: Array) -> tuple[Array, Array]:
    """Return the solutions (draws, candidates, K) and squared errors (draws, candidates) of targets (draws, N)."""
    transposed = np.swapaxes(design, -1, -2)
    products = (transposed @ targets[:, None, :, None])[..., 0]
    ridge = 1e-13 * np.eye(design.shape[-1])  # exponents near 0 make all terms alike
    gram = transposed @ design
    solutions = np.linalg.solve(gram + ridge * np.trace(gram, axis1=-2, axis2=-1)[..., None, None], products[..., None])
    solutions = solutions[..., 0]
    residuals = targets[:, None] - (design @ solutions[..., None])[..., 0]
    return solutions, (residuals**2).sum(axis=-1)
