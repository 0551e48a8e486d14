"""The gate: does a variant of the training or the model reach the baseline's loss with less compute?

Baseline and variant train at two sizes, on equal tokens, with the same seeds. The *effective speed-up* of a size is the
compute that the law of the baseline's loss needs for the variant's loss, over the variant's compute. A variant is
accepted if a paired t test by seed shows a speed-up above 1 at both sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from lm.common.errors import UserError
from lm.experiments.axes import Settings
from lm.experiments.config import GateConfig
from lm.experiments.paired_test import level_left, p_greater, pairs_needed, standard_error, upper_bound
from lm.experiments.scaling_law import fit_loss_over_compute
from lm.experiments.trial import TrialResult

Arm = Literal["baseline", "variant"]
Verdict = Literal["accepted", "rejected", "undecided"]

LEVEL = 0.01
"""Largest p of an accepted variant, at each size: the probability that a variant without a speed-up there passes."""
EXCLUSION_LEVEL = 0.05
"""Probability that a variant is rejected although it has ``least_speedup``, at each size."""
_INTERVAL = 0.95  # of a speed-up


@dataclass(frozen=True)
class Training:
    """One training of a gate."""

    arm: Arm
    size: int
    """Index in ``GateConfig.sizes``."""
    seed: int
    """Counted from 0."""
    length: float
    """Steps over those of the comparison. Other lengths than 1 are for the law of the baseline."""

    def settings(self, config: GateConfig, first_seed: int, steps: int) -> Settings:
        """Return the options of this training. ``steps`` are those of a size that does not set them."""
        size = config.sizes[self.size]
        settings: Settings = {"arm": self.arm, **size, "train.seed": first_seed + self.seed}
        if self.length != 1:
            settings["train.steps"] = max(1, round(self.length * float(size.get("train.steps", steps))))
        return settings | (config.variant if self.arm == "variant" else {})


_PAIR = Training("baseline", 1, 0, 1.0), Training("variant", 1, 0, 1.0)  # the sweep goes on with the model of one


def plan_trainings(config: GateConfig) -> list[Training]:
    """Return all trainings: the pairs, seed by seed, then the other lengths. Without a variant, those of the baseline.

    Arms and sizes take turns, so that a change in the speed of the machine meets all alike.
    """
    arms: tuple[Arm, ...] = ("baseline", "variant") if config.variant else ("baseline",)
    sizes = range(len(config.sizes))
    pairs = [Training(arm, size, seed, 1.0) for seed in range(config.seeds) for size in sizes for arm in arms]
    return pairs + [Training("baseline", size, 0, length) for size in sizes for length in config.lengths]


@dataclass(frozen=True)
class LossLaw:
    """The baseline's loss over compute: ``irreducible + coefficient · FLOPs ** exponent``."""

    irreducible: float
    coefficient: float
    exponent: float

    def __call__(self, flops: float) -> float:
        """Return the loss."""
        return float(self.irreducible + self.coefficient * flops**self.exponent)

    def compute_for(self, loss: float) -> float:
        """Return the FLOPs for a loss; infinite if it is not above the irreducible one."""
        reducible = loss - self.irreducible
        return float((reducible / self.coefficient) ** (1 / self.exponent)) if reducible > 0 else math.inf


def fit_loss_law(flops: Sequence[float], losses: Sequence[float]) -> LossLaw:
    """Fit the law of one size to trainings of several lengths. Raises UserError if the loss does not fall."""
    irreducible, power = fit_loss_over_compute(flops, losses)
    if not (power.exponent < 0 < power.coefficient):
        raise UserError(
            "The baseline's loss does not fall with its compute, so it has no law; set gate.lengths further apart, or "
            "more train.steps."
        )
    return LossLaw(irreducible, power.coefficient, power.exponent)


@dataclass(frozen=True)
class SizeResult:
    """The comparison at one size. A gain is the baseline's loss minus the variant's, at equal tokens."""

    seeds: int
    baseline_loss: float
    """Mean bits per byte of the validation text."""
    variant_loss: float
    gain: float
    """Mean over the seeds."""
    gain_error: float
    """Standard error of the mean."""
    needed_gain: float
    """Gain of an effective speed-up of 1, by the law: 0 if the variant computes as much per token as the baseline."""
    least_gain: float
    """Gain of ``least_speedup``."""
    p: float
    """One-sided p value of a gain above ``needed_gain``, multiplied so that ``LEVEL`` is the limit in every look."""
    highest_gain: float | None
    """Bound of the true gain at this look's share of ``EXCLUSION_LEVEL``; None if it has none."""
    baseline_flops: float
    variant_flops: float
    law: LossLaw
    points: list[tuple[float, float]]
    """FLOPs and loss of the baseline's trainings of other lengths."""
    speedup: float | None
    """Effective speed-up in FLOPs. None: no compute reaches this loss by the law."""
    speedup_low: float | None
    """Ends of its 95 % interval, by the scatter of the gains; the error of the law is left out."""
    speedup_high: float | None

    @property
    def is_extrapolated(self) -> bool:
        """Whether the law has no training as long as the speed-up asks for."""
        longest = max([self.baseline_flops, *(flops for flops, _ in self.points)])
        return self.speedup is None or self.speedup * self.variant_flops > longest

    def is_below(self, gain: float) -> bool:
        """Whether a true gain of this much or more is excluded."""
        return self.highest_gain is not None and self.highest_gain < gain

    @property
    def deviation(self) -> float:
        """Standard deviation of the gains."""
        return self.gain_error * math.sqrt(self.seeds)


def compare_size(
    baseline: Sequence[float],
    variant: Sequence[float],
    law: LossLaw,
    flops: tuple[float, float],
    level: float,
    least_speedup: float = 1.05,
    points: Sequence[tuple[float, float]] = (),
) -> SizeResult:
    """Compare losses of the same seeds. ``flops`` are those of a training of the baseline and of the variant.

    ``level`` is this look's share of ``LEVEL``. ``points``: see :class:`SizeResult`. Losses are differences from the
    law at the baseline's compute, so that equal losses have the speed-up 1 whatever the law is.
    """
    gains = [before - after for before, after in zip(baseline, variant, strict=True)]
    baseline_flops, variant_flops = flops
    expected = law(baseline_flops)

    def speedup(gain: float) -> float | None:
        ratio = law.compute_for(expected - gain) / variant_flops
        return ratio if math.isfinite(ratio) else None

    needed_gain = expected - law(variant_flops)
    highest = upper_bound(gains, EXCLUSION_LEVEL * level / LEVEL) if level > 0 else math.inf
    low, high = (upper_bound(gains, (1 + sign * _INTERVAL) / 2) for sign in (1, -1))
    p = p_greater(gains, needed_gain)
    return SizeResult(
        seeds=len(gains),
        baseline_loss=fmean(baseline),
        variant_loss=fmean(variant),
        gain=fmean(gains),
        gain_error=standard_error(gains),
        needed_gain=needed_gain,
        least_gain=expected - law(least_speedup * variant_flops),
        p=min(1.0, p * LEVEL / level) if level > 0 else 1.0,
        highest_gain=highest if math.isfinite(highest) else None,
        baseline_flops=baseline_flops,
        variant_flops=variant_flops,
        law=law,
        points=list(points),
        speedup=speedup(fmean(gains)),
        speedup_low=speedup(low),
        speedup_high=speedup(high),
    )


@dataclass(frozen=True)
class GateResult:
    """The verdict of a look."""

    verdict: Verdict
    reason: str
    level: float
    """Share of ``LEVEL`` that this look may spend: p before its correction must not be above it."""
    spent: float
    """What earlier looks at the same comparison have spent."""
    sizes: list[SizeResult]
    """Empty if the variant diverged."""
    seeds_needed: int | None
    """If undecided: the number of seeds that finds ``least_speedup`` in 80 % of cases, by the deviation of the gains.
    None: no number does."""
    kept: int
    """Index of a training of the arm to go on with: at the second size, with the first seed."""


def decide(sizes: Sequence[SizeResult]) -> tuple[Verdict, str]:
    """Return the verdict on a comparison, and its reason.

    Accepted: p is at most ``LEVEL`` at both sizes. Rejected: at one of them, the variant is slower, or a gain of
    ``least_speedup`` is excluded. A small gain that is certain is accepted; the reason says that it is small.
    """
    below = {
        limit: [number for number, size in enumerate(sizes, start=1) if size.is_below(getattr(size, limit))]
        for limit in ("needed_gain", "least_gain")
    }
    places = {limit: f"at size {' and '.join(map(str, numbers))}" for limit, numbers in below.items()}
    too_small = f"less than the least speed-up {places['least_gain']}" if below["least_gain"] else ""
    if all(size.p <= LEVEL for size in sizes):
        but = f", but gains {too_small}" if too_small else ""
        return "accepted", f"the variant needs less compute at both sizes{but}"
    if below["needed_gain"]:
        return "rejected", f"the variant is slower {places['needed_gain']}"
    return ("rejected", f"the variant gains {too_small}") if too_small else ("undecided", "more seeds may decide")


def judge(config: GateConfig, results: Sequence[TrialResult], spent: float) -> GateResult:
    """Judge a variant by the results of :func:`plan_trainings`. ``spent``: see :func:`level_left`.

    A variant that diverges is rejected. Raises UserError if there is no validation text, if the baseline diverges, if a
    training is refused, or if the baseline's loss does not fall with its compute.
    """
    trainings = plan_trainings(config)
    for training, result in zip(trainings, results, strict=True):
        if result.state == "refused" or (training.arm == "baseline" and result.state != "finished"):
            raise UserError(
                f"The gate has nothing to compare: a training of the {training.arm} at size {training.size + 1} is "
                f"{result.state}: {result.reason.rstrip('.')}."
            )
        if result.state == "finished" and result.valid_bits_per_byte is None:
            raise UserError("The gate compares losses of validation text; set data.valid or data.valid_fraction.")
    found = dict(zip(trainings, results, strict=True))
    level = level_left(config.seeds, config.max_seeds, LEVEL, spent)
    kept_baseline, kept_variant = (trainings.index(training) for training in _PAIR)
    variants = [result for training, result in found.items() if training.arm == "variant"]
    if diverged := [result.state for result in variants if result.state != "finished"]:
        reason = f"the variant diverged in {len(diverged)} of {len(variants)} trainings"
        return GateResult("rejected", reason, level, spent, [], None, kept_baseline)
    sizes = [_compare(config, found, size, level) for size in range(len(config.sizes))]
    verdict, reason = decide(sizes)
    kept, needed = kept_variant if verdict == "accepted" else kept_baseline, None
    if verdict == "undecided":
        effects = [
            (size.least_gain - size.needed_gain) / size.deviation if size.deviation else math.inf for size in sizes
        ]
        needed = pairs_needed(effects, config.seeds, config.max_seeds, LEVEL, spent + level)
    return GateResult(verdict, reason, level, spent, sizes, needed, kept)


def _compare(config: GateConfig, found: dict[Training, TrialResult], size: int, level: float) -> SizeResult:
    def losses(arm: Arm) -> list[float]:
        return [_loss(found[Training(arm, size, seed, 1.0)]) for seed in range(config.seeds)]

    pair = [found[Training(arm, size, 0, 1.0)] for arm in ("baseline", "variant")]
    others = [found[Training("baseline", size, 0, length)] for length in config.lengths]
    points = [(result.flops, _loss(result)) for result in others]
    law = fit_loss_law(*zip((pair[0].flops, fmean(losses("baseline"))), *points, strict=True))
    arms = losses("baseline"), losses("variant")
    return compare_size(*arms, law, (pair[0].flops, pair[1].flops), level, config.least_speedup, points)


def _loss(result: TrialResult) -> float:
    return float(result.valid_bits_per_byte or 0.0)


def measured_seconds(rows: Sequence[dict[str, Any]], tokens: int) -> float | None:
    """Return the time of a training's steps, from its rows of metrics: by the median of its tokens per second, after
    the first row, whose step warms up. None if no row has them."""
    speeds = [float(row["tokens_per_second"]) for row in rows if row.get("tokens_per_second")]
    return tokens / median(speeds[1:] or speeds) if speeds else None


def speedup_in_time(size: SizeResult, baseline_seconds: float, variant_seconds: float) -> float | None:
    """Return the effective speed-up in measured time: what the baseline needs for the variant's loss, at its seconds
    for a FLOP, over the variant's seconds."""
    if size.speedup is None:
        return None
    return size.speedup * size.variant_flops / size.baseline_flops * baseline_seconds / variant_seconds
