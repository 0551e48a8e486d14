"""Scaling laws from trainings of several sizes at equal FLOPs: approach 2 of Hoffmann et al. 2022 ("Chinchilla").

At each budget, a parabola in the logarithm of the parameters is fitted to the losses. Its minimum is the best size of
the budget. Power laws of the budget go through the minima. From four budgets on, the loss may have an irreducible part,
``E + A · C^-alpha`` as in that paper: fewer budgets do not tell it from a power law.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.experiments.axes import Settings
from lm.experiments.trial import TrialResult

Array = npt.NDArray[np.float64]

_DRAWS = 500  # of the bootstrap
_SEED = 0
_MAX_LOG_DISTANCE = math.log(100)  # of the best size from the sizes trained
MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS = 4
_DECAYS = np.geomspace(0.005, 2.0, 160)  # alphas that are tried


@dataclass(frozen=True)
class Measurement:
    """The loss of one training."""

    budget: float
    """FLOPs."""
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class PowerLaw:
    """``y = coefficient · x ** exponent``, and the standard error of the exponent."""

    coefficient: float
    exponent: float
    exponent_error: float

    def __call__(self, x: float) -> float:
        """Return ``y``."""
        return float(self.coefficient * x**self.exponent)


@dataclass(frozen=True)
class Parabola:
    """``loss = curvature · (ln parameters - ln best_parameters)² + best_loss`` at a budget."""

    budget: float
    curvature: float
    best_parameters: float
    best_tokens: float
    best_loss: float
    is_inside: bool
    """Whether the minimum lies between the smallest and the largest size that were trained."""

    def __call__(self, parameters: float) -> float:
        """Return the loss of a size."""
        return float(self.curvature * math.log(parameters / self.best_parameters) ** 2 + self.best_loss)


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted scaling law."""

    parabolas: list[Parabola]
    parameters: PowerLaw
    """Best number of parameters of a budget in FLOPs. Hoffmann et al. name its exponent a."""
    tokens: PowerLaw
    """Best number of tokens of a budget. Hoffmann et al. name its exponent b."""
    loss: PowerLaw
    """Loss of the best size of a budget, without the irreducible loss."""
    irreducible_loss: float
    """Loss that no budget goes below. 0 with fewer than four budgets, which do not show it."""
    loss_noise: float
    """Standard deviation of the losses around the parabolas."""
    law_noise: float
    """Standard deviation of ln loss of the minima around the law."""

    def predict_loss(self, budget: float) -> float:
        """Return the loss of the best size of a budget."""
        return self.irreducible_loss + self.loss(budget)


@dataclass(frozen=True)
class Prediction:
    """The loss that a law predicts for the best size of a budget, with the 95 % interval, and that size."""

    budget: float
    parameters: float
    tokens: float
    loss: float
    low: float
    high: float


def measurements(
    settings: Sequence[Settings], results: Sequence[TrialResult], budget: str, size: str
) -> list[tuple[Measurement, int]]:
    """Return the best finished training of each budget and size, and the index of its point."""

    def loss(index: int) -> float:
        return cast(float, results[index].objective)  # that of a finished training

    best: dict[tuple[Any, Any], int] = {}
    for index, (point, result) in enumerate(zip(settings, results, strict=True)):
        key = point[budget], point[size]
        if result.state == "finished" and (key not in best or loss(index) < loss(best[key])):
            best[key] = index
    return [
        (Measurement(float(key[0]), results[index].parameters, results[index].tokens, loss(index)), index)
        for key, index in best.items()
    ]


def fit_power_law(x: Sequence[float] | Array, y: Sequence[float] | Array) -> PowerLaw:
    """Fit a power law by least squares in both logarithms. The error is nan for two points."""
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    slope, intercept = map(float, _line(log_x, log_y))
    residuals = log_y - slope * log_x - intercept
    free = len(log_x) - 2
    spread = float(((log_x - log_x.mean()) ** 2).sum())
    error = math.sqrt(float((residuals**2).sum()) / free / spread) if free > 0 else math.nan
    return PowerLaw(math.exp(intercept), slope, error)


def _line(x: Array, y: Array) -> tuple[Array, Array]:
    """Return slope and intercept of the lines of least squares: x (N,), y (..., N) → (...) each."""
    centred = x - x.mean()
    slope = (centred * y).sum(axis=-1) / (centred**2).sum()
    return slope, y.mean(axis=-1) - slope * x.mean()


def fit_parabola(runs: Sequence[Measurement]) -> Parabola:
    """Fit the parabola of a budget. Raises UserError for fewer than three sizes, or a curve without a minimum."""
    log_size = np.log([run.parameters for run in runs])
    budget = runs[0].budget
    if len(set(log_size.tolist())) < 3:
        raise UserError(f"The budget of {budget:.3g} FLOPs has {len(set(log_size.tolist()))} sizes; a fit needs 3.")
    centre = float(log_size.mean())
    a, b, c = (float(value) for value in np.polyfit(log_size - centre, np.array([run.loss for run in runs]), 2))
    best = centre - b / (2 * a) if a > 0 else math.inf
    best_loss = c - b * b / (4 * a) if a > 0 else 0.0
    if abs(best - centre) > _MAX_LOG_DISTANCE or best_loss <= 0:
        raise UserError(
            f"The losses at {budget:.3g} FLOPs have no minimum near these sizes; add smaller and larger sizes."
        )
    slope, intercept = map(float, _line(log_size, np.log([run.tokens for run in runs])))
    is_inside = bool(log_size.min() <= best <= log_size.max())
    return Parabola(budget, a, math.exp(best), math.exp(slope * best + intercept), best_loss, is_inside)


def fit_scaling_law(runs: Sequence[Measurement]) -> ScalingLaw:
    """Fit parabolas and power laws. Raises UserError for fewer than two budgets, and as :func:`fit_parabola` does.

    The error of an exponent is of the scatter around the power law and of a bootstrap, in which the losses are drawn
    again with the noise around the parabolas.
    """
    groups = _by_budget(runs)
    parabolas = [fit_parabola(group) for group in groups]
    free = len(runs) - 3 * len(parabolas)
    if not free:
        raise UserError(
            "With three sizes at each budget the errors of a scaling law are unknown; add a fourth to one of them."
        )
    errors = [run.loss - curve(run.parameters) for group, curve in zip(groups, parabolas, strict=True) for run in group]
    noise = math.sqrt(sum(error**2 for error in errors) / free)
    drawn = _draw_minima(groups, parabolas, noise)
    budgets = [parabola.budget for parabola in parabolas]

    def fit(name: str, log_draws: Array) -> PowerLaw:
        law = fit_power_law(budgets, [getattr(parabola, name) for parabola in parabolas])
        scatter = 0.0 if math.isnan(law.exponent_error) else law.exponent_error
        low, high = np.percentile(_line(np.log(budgets), log_draws)[0], (15.9, 84.1))  # no outlier rules the error
        return PowerLaw(law.coefficient, law.exponent, math.hypot(scatter, float(high - low) / 2))

    irreducible, fitted = 0.0, 2
    if len(budgets) < MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS:
        loss = fit("best_loss", drawn.losses)
    else:
        fitted = 3
        irreducible, curve = fit_loss_over_compute(budgets, [parabola.best_loss for parabola in parabolas])
        low, high = np.percentile(_fit_curves(np.log(budgets), np.exp(drawn.losses)).decays, (15.9, 84.1))
        loss = replace(curve, exponent_error=float(high - low) / 2)
    residuals = [math.log(parabola.best_loss / (irreducible + loss(parabola.budget))) for parabola in parabolas]
    law_noise = math.sqrt(sum(residual**2 for residual in residuals) / max(1, len(budgets) - fitted))
    return ScalingLaw(
        parabolas,
        fit("best_parameters", drawn.parameters),
        fit("best_tokens", drawn.tokens),
        loss,
        irreducible,
        noise,
        law_noise,
    )


def fit_loss_over_compute(budgets: Sequence[float], losses: Sequence[float]) -> tuple[float, PowerLaw]:
    """Fit ``E + A · C^-alpha`` by least squares. Return E, the irreducible loss, and the power law; its error is nan.

    With fewer than four budgets E is 0, and the power law is fitted in logarithms.
    """
    if len(budgets) < MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS:
        return 0.0, replace(fit_power_law(budgets, losses), exponent_error=math.nan)
    log_budgets = np.log(np.asarray(budgets, float))
    curve = _fit_curves(log_budgets, np.asarray([losses], float))
    decay = float(curve.decays[0])
    coefficient = float(curve.scales[0]) * math.exp(decay * float(log_budgets.mean()))
    return float(curve.offsets[0]), PowerLaw(coefficient, -decay, math.nan)


class _Curves(NamedTuple):
    """Curves ``offset + scale · exp(-decay · (ln budget - mean of ln budget))``: (draws,) each."""

    offsets: Array
    scales: Array
    decays: Array

    def __call__(self, distance: float) -> Array:
        """Return the losses at a distance of ln budget from the mean."""
        return self.offsets + self.scales * np.exp(-self.decays * distance)


def _fit_curves(log_budgets: Array, losses: Array) -> _Curves:
    """Fit curves to losses (draws, budgets) by least squares, with offsets of 0 or more."""
    distances = log_budgets - log_budgets.mean()
    curves = _choose_decays(distances, losses, np.broadcast_to(_DECAYS, (len(losses), len(_DECAYS))))
    step = math.log(_DECAYS[1] / _DECAYS[0])
    for _ in range(2):  # each time with 1 / 20 of the distance
        curves = _choose_decays(distances, losses, curves.decays[:, None] * np.exp(np.linspace(-step, step, 41)))
        step /= 20
    return curves


def _choose_decays(distances: Array, losses: Array, decays: Array) -> _Curves:
    """Return the best curve of each row of losses (draws, budgets) with one of its decays (draws, candidates).

    At a given decay, offset and scale are those of a line.
    """
    falling = np.exp(-decays[..., None] * distances)  # (draws, candidates, budgets)
    targets = losses[:, None, :]
    centred = falling - falling.mean(axis=-1, keepdims=True)
    scales = (centred * targets).sum(axis=-1) / (centred**2).sum(axis=-1)
    offsets = targets.mean(axis=-1) - scales * falling.mean(axis=-1)
    through_zero = (falling * targets).sum(axis=-1) / (falling**2).sum(axis=-1)
    scales, offsets = np.where(offsets < 0, through_zero, scales), np.maximum(offsets, 0.0)
    errors = ((targets - offsets[..., None] - scales[..., None] * falling) ** 2).sum(axis=-1)
    chosen = np.where(scales > 0, errors, np.inf).argmin(axis=1)[:, None]  # the loss falls with the budget
    offsets, scales, decays = (np.take_along_axis(part, chosen, 1)[:, 0] for part in (offsets, scales, decays))
    return _Curves(offsets, scales, decays)


def predict(runs: Sequence[Measurement], law: ScalingLaw, budget: float) -> Prediction:
    """Predict the best loss of a budget with its 95 % interval.

    The interval has the bootstrap of :func:`fit_scaling_law`, and the scatter of the minima around the law. With fewer
    than four budgets it assumes that the power law goes on: an irreducible loss would make the true loss higher.
    """
    log_budgets = np.log([parabola.budget for parabola in law.parabolas])
    draws = _draw_minima(_by_budget(runs), law.parabolas, law.loss_noise).losses
    distance = math.log(budget) - float(log_budgets.mean())
    generator = np.random.default_rng(_SEED + 1)
    if len(log_budgets) < MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS:
        slopes, intercepts = _line(log_budgets, draws)
        spread = float(((log_budgets - log_budgets.mean()) ** 2).sum())
        scatter = law.law_noise * math.sqrt(1 + 1 / len(log_budgets) + distance**2 / spread)
        losses = np.exp(slopes * math.log(budget) + intercepts + scatter * generator.standard_normal(len(slopes)))
    else:
        losses = _fit_curves(log_budgets, np.exp(draws + law.law_noise * generator.standard_normal(draws.shape)))(
            distance
        )
    low, high = np.percentile(losses, (2.5, 97.5))
    loss = law.predict_loss(budget)
    # Draws without a minimum are left out, so near an edge of the sizes the interval may lie beside the prediction.
    low, high = min(float(low), loss), max(float(high), loss)
    return Prediction(budget, law.parameters(budget), law.tokens(budget), loss, low, high)


def _by_budget(runs: Sequence[Measurement]) -> list[list[Measurement]]:
    groups: dict[float, list[Measurement]] = defaultdict(list)
    for run in runs:
        groups[run.budget].append(run)
    if len(groups) < 2:
        raise UserError(f"A scaling law needs at least two budgets, and the sweep has {len(groups)}.")
    return [groups[budget] for budget in sorted(groups)]


class _Minima(NamedTuple):
    """Logarithms of the best size, its tokens and its loss: (draws, budgets) each."""

    parameters: Array
    tokens: Array
    losses: Array


def _draw_minima(groups: Sequence[Sequence[Measurement]], parabolas: Sequence[Parabola], noise: float) -> _Minima:
    """Draw losses around the parabolas, and fit parabolas to them. Draws without a minimum near the sizes are left out.

    The noise is known from few losses only, so each draw has another one.
    """
    generator = np.random.default_rng(_SEED)
    free = sum(map(len, groups)) - 3 * len(groups)
    noises = noise * np.sqrt(free / generator.chisquare(free, _DRAWS))
    columns = []
    for group, parabola in zip(groups, parabolas, strict=True):
        log_size, log_tokens = np.log([(run.parameters, run.tokens) for run in group]).T
        centre = log_size.mean()
        losses = np.array([parabola(run.parameters) for run in group])
        drawn = losses[:, None] + noises * generator.standard_normal((len(group), _DRAWS))
        a, b, c = np.polyfit(log_size - centre, drawn, 2)
        with np.errstate(all="ignore"):  # a <= 0 is left out below
            best, loss = centre - b / (2 * a), c - b * b / (4 * a)
        slope, intercept = _line(log_size, log_tokens)
        is_near = (a > 0) & (np.abs(best - centre) <= _MAX_LOG_DISTANCE)
        columns.append((np.where(is_near, best, np.nan), slope * best + intercept, np.where(loss > 0, loss, np.nan)))
    parameters, tokens, best_losses = (np.stack(parts, axis=1) for parts in zip(*columns, strict=True))
    is_valid = np.isfinite(parameters + best_losses).all(axis=1)
    if not is_valid.any():
        raise UserError("The losses are too noisy for a scaling law; add smaller and larger sizes.")
    return _Minima(parameters[is_valid], tokens[is_valid], np.log(best_losses[is_valid]))
