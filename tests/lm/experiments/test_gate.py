"""The gate on simulated losses: how often it accepts what is no gain, and finds one that is."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.experiments.config import GateConfig
from lm.experiments.gate import (
    LEVEL,
    LossLaw,
    SizeResult,
    Training,
    Verdict,
    compare_size,
    decide,
    fit_loss_law,
    judge,
    measured_seconds,
    plan_trainings,
    speedup_in_time,
)
from lm.experiments.paired_test import level_left
from lm.experiments.trial import TrialResult

CONFIG = GateConfig(sizes=[{"model.d_model": 32}, {"model.d_model": 64}], variant={"train.beta2": 0.99})
LAW = LossLaw(1.0, 3.0, -0.3)
FLOPS = 1000.0
DEVIATION = 0.005  # of a seed
Array = np.ndarray[Any, np.dtype[np.float64]]


def compare(losses_2AS: Array, level: float) -> list[SizeResult]:
    """Compare losses (sizes, arms, seeds) whose law is known."""
    return [compare_size(baseline, variant, LAW, (FLOPS, FLOPS), level) for baseline, variant in losses_2AS.tolist()]


def simulate(count: int, gains: tuple[float, float], looks: tuple[int, ...]) -> list[list[Verdict]]:
    """Return the verdicts of ``count`` comparisons with these true gains of both sizes, in deviations of a seed.

    An undecided one is looked at again with more seeds.
    """
    generator, found = np.random.default_rng(0), []
    for _ in range(count):
        losses_2AS = DEVIATION * generator.standard_normal((2, 2, max(looks)))
        losses_2AS[:, 1] -= DEVIATION * np.array(gains)[:, None]
        verdicts: list[Verdict] = []
        spent = 0.0
        for seeds in looks:
            level = level_left(seeds, CONFIG.max_seeds, LEVEL, spent)
            spent += level
            verdicts.append(decide(compare(losses_2AS[:, :, :seeds], level))[0])
            if verdicts[-1] != "undecided":
                break
        found.append(verdicts)
    return found


@pytest.mark.parametrize("looks", [(12,), (24,), (12, 24), (6, 9, 12, 16, 20, 24)], ids=str)
def test_of_10_000_comparisons_without_a_gain_at_one_size_at_most_1_5_percent_are_accepted(
    looks: tuple[int, ...],
) -> None:
    """A large gain at the other size makes it the hardest null. No gain at both is accepted nearly never."""
    accepted = sum(verdicts[-1] == "accepted" for verdicts in simulate(10_000, (0.0, 100.0), looks))
    assert accepted <= 150
    assert accepted >= 100 * looks[-1] / 24 * 0.5, "a gate that accepts nothing would pass too"


def test_of_10_000_comparisons_without_any_gain_none_or_few_are_accepted() -> None:
    assert sum(verdicts[-1] == "accepted" for verdicts in simulate(10_000, (0.0, 0.0), (12, 24))) <= 10


def test_a_gain_of_twice_the_deviation_of_the_seeds_is_found_at_the_default_number_of_seeds() -> None:
    assert (CONFIG.seeds, CONFIG.max_seeds) == (12, 24)
    found = simulate(2_000, (2.0, 2.0), (CONFIG.seeds,))
    assert 0.8 * 2_000 <= sum(verdicts == ["accepted"] for verdicts in found) < 0.95 * 2_000


def test_a_slower_variant_is_rejected_and_the_least_speedup_hardly_ever() -> None:
    slower = simulate(500, (-3.0, -3.0), (12,))
    assert sum(verdicts == ["rejected"] for verdicts in slower) >= 495
    least = (LAW(FLOPS) - LAW(1.05 * FLOPS)) / DEVIATION
    worthy = simulate(2_000, (least, least), (12, 24))
    assert sum(verdicts[-1] == "rejected" for verdicts in worthy) <= 0.1 * 2_000, "5 % at each size"


@given(st.floats(0.3, 5), st.floats(0.5, 2))
def test_the_speedup_of_known_losses_is_found(speedup: float, cost: float) -> None:
    """A variant whose loss is that of the baseline with ``speedup`` times its compute."""
    baseline = [LAW(FLOPS)] * 3
    variant = [LAW(speedup * cost * FLOPS)] * 3
    size = compare_size(baseline, variant, LAW, (FLOPS, cost * FLOPS), LEVEL)
    assert size.speedup == pytest.approx(speedup)
    assert size.p == (0.0 if size.gain > size.needed_gain else 1.0)
    assert size.least_gain == pytest.approx(LAW(FLOPS) - LAW(1.05 * cost * FLOPS))
    assert speedup_in_time(size, 10.0, 20.0) == pytest.approx(speedup * cost / 2)


def test_equal_losses_have_no_speedup_whatever_the_law() -> None:
    law = LossLaw(0.2, 9.0, -0.1)  # far from the losses
    size = compare_size([1.0, 1.1, 1.2], [1.0, 1.1, 1.2], law, (FLOPS, FLOPS), LEVEL)
    assert size.speedup == pytest.approx(1) and size.p == 1 and size.needed_gain == 0


def test_a_loss_below_the_irreducible_one_has_no_finite_speedup() -> None:
    losses = [LAW(FLOPS)] * 3
    size = compare_size(losses, [loss - 1 for loss in losses], LAW, (FLOPS, FLOPS), LEVEL)
    assert size.speedup is None and size.is_extrapolated and speedup_in_time(size, 1.0, 1.0) is None


def test_a_speedup_beyond_the_longest_baseline_is_extrapolated() -> None:
    losses = [LAW(1.5 * FLOPS)] * 3
    points = [(length * FLOPS, LAW(length * FLOPS)) for length in (0.5, 2)]
    near, far = (
        compare_size([LAW(FLOPS)] * 3, losses, LAW, (FLOPS, FLOPS), LEVEL, points=points[:count]) for count in (2, 1)
    )
    assert not near.is_extrapolated and far.is_extrapolated and near.speedup == far.speedup == pytest.approx(1.5)


def test_without_any_error_left_nothing_is_decided() -> None:
    sizes = compare(np.array([[[1.0, 1.1, 1.2], [0.5, 0.62, 0.7]]] * 2), 0.0)
    assert decide(sizes) == ("undecided", "more seeds may decide")
    assert [size.p for size in sizes] == [1.0, 1.0] and sizes[0].highest_gain is None


@given(st.floats(0, 2), st.floats(0.05, 1))
def test_the_law_of_exact_losses_is_found(irreducible: float, alpha: float) -> None:
    truth = LossLaw(irreducible, 2.0, -alpha)
    flops = [FLOPS * length for length in (1, *CONFIG.lengths)]
    law = fit_loss_law(flops, [truth(amount) for amount in flops])
    for amount in (*flops, 3 * FLOPS):
        assert law(amount) == pytest.approx(truth(amount), rel=2e-3)
        assert law.compute_for(law(amount)) == pytest.approx(amount)


@pytest.mark.parametrize("count", [2, 4])
def test_losses_that_rise_with_compute_have_no_law(count: int) -> None:
    with pytest.raises(UserError, match="loss does not fall with its compute"):
        fit_loss_law([1.0, 2.0, 4.0, 8.0][:count], [1.0, 1.1, 1.2, 1.3][:count])


def make_results(config: GateConfig, gain: float, seed: int = 0, **variant: Any) -> list[TrialResult]:
    """Return results of the law with the noise of seeds; those of the variant are lower by ``gain`` deviations."""
    generator, results = np.random.default_rng(seed), []
    for training in plan_trainings(config):
        flops = FLOPS * training.length * (1 + training.size)
        loss = LAW(flops) + DEVIATION * generator.standard_normal() - gain * DEVIATION * (training.arm == "variant")
        result = TrialResult("finished", "", 10, 100, 5, flops, loss, loss, float(loss), [])
        results.append(replace(result, **variant) if training.arm == "variant" else result)
    return results


def test_the_trainings_are_pairs_then_lengths() -> None:
    config = replace(CONFIG, seeds=3)
    trainings = plan_trainings(config)
    assert trainings[:4] == [Training(arm, size, 0, 1.0) for size in (0, 1) for arm in ("baseline", "variant")]
    assert len(trainings) == len(set(trainings)) == 3 * 4 + 2 * 3
    assert trainings[:12] == sorted(trainings[:12], key=lambda training: training.seed)
    assert [training.settings(config, 7, 100) for training in (trainings[3], trainings[-1])] == [
        {"arm": "variant", "model.d_model": 64, "train.seed": 7, "train.beta2": 0.99},
        {"arm": "baseline", "model.d_model": 64, "train.seed": 7, "train.steps": 200},
    ]
    assert plan_trainings(replace(config, variant={})) == [part for part in trainings if part.arm == "baseline"]


def test_a_gain_is_accepted_and_the_variant_kept() -> None:
    result = judge(CONFIG, make_results(CONFIG, 5), 0.0)
    assert (result.verdict, result.level) == ("accepted", LEVEL / 2)
    assert plan_trainings(CONFIG)[result.kept] == Training("variant", 1, 0, 1.0)
    assert all(size.speedup and size.speedup > 1 for size in result.sizes)
    assert all((size.speedup_low or 0) < (size.speedup or 0) < (size.speedup_high or math.inf) for size in result.sizes)


def test_a_loss_is_rejected_and_the_baseline_kept() -> None:
    result = judge(CONFIG, make_results(CONFIG, -5), 0.0)
    assert (result.verdict, result.reason) == ("rejected", "the variant is slower at size 1 and 2")
    assert plan_trainings(CONFIG)[result.kept] == Training("baseline", 1, 0, 1.0)


def test_an_undecided_variant_says_how_many_seeds_decide() -> None:
    config = replace(CONFIG, seeds=3, least_speedup=1.02)
    first = judge(config, make_results(config, 0.3), 0.0)
    assert first.verdict == "undecided" and first.seeds_needed and first.seeds_needed > 3
    later = judge(config, make_results(config, 0.3), first.level)
    assert later.level == 0 and later.verdict == "undecided", "the same number of seeds has no error left"
    last = replace(config, seeds=24)
    assert judge(last, make_results(last, 0.3), LEVEL).seeds_needed is None


def test_the_deviation_decides_how_many_seeds_are_needed() -> None:
    config = replace(CONFIG, seeds=3)
    needed = []
    for least in (1.02, 1.05, 1.1):
        result = judge(replace(config, least_speedup=least), make_results(config, 0.5), 0.0)
        needed.append(result.seeds_needed or 0)
    assert all(before > after > 3 for before, after in pairwise(needed)), needed


def test_a_variant_that_diverges_is_rejected() -> None:
    result = judge(CONFIG, make_results(CONFIG, 0, state="diverged", reason="nan"), 0.0)
    assert (result.verdict, result.sizes) == ("rejected", [])
    assert result.reason == "the variant diverged in 24 of 24 trainings"


def test_what_cannot_be_compared_is_a_user_error() -> None:
    results = make_results(CONFIG, 0)
    with pytest.raises(UserError, match=r"a training of the variant at size 1 is refused: Too little memory\.$"):
        judge(CONFIG, make_results(CONFIG, 0, state="refused", reason="Too little memory."), 0.0)
    results[-1] = replace(results[-1], state="diverged", reason="nan")
    with pytest.raises(UserError, match="a training of the baseline at size 2 is diverged: nan"):
        judge(CONFIG, results, 0.0)
    with pytest.raises(UserError, match=r"set data\.valid or data\.valid_fraction"):
        judge(CONFIG, make_results(CONFIG, 0, valid_bits_per_byte=None), 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 2}, "gate.seeds is 2; it must be at least 3"),
        ({"seeds": 30}, "gate.max_seeds 24 must be at least gate.seeds 30"),
        ({"sizes": [{}]}, "gate.sizes has 1 sizes; a gate compares at two"),
        ({"lengths": []}, "gate.lengths is"),
        ({"lengths": [0.5, 1]}, "gate.lengths is"),
        ({"lengths": [0.5, 0.5]}, "gate.lengths is"),
        ({"least_speedup": 1.0}, "gate.least_speedup is 1.0; it must be above 1"),
    ],
)
def test_a_wrong_gate_is_a_user_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **change)


def test_the_time_of_a_training_is_that_of_its_median_speed() -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "tokens_per_second": 1}, {"step": 5, "valid_loss": 2.0}]
    assert measured_seconds(rows, 100) == 100
    rows += [{"step": step, "tokens_per_second": speed} for step, speed in ((20, 50), (40, 40), (60, 3))]
    assert measured_seconds(rows, 100) == 2.5
    assert measured_seconds([], 100) is None
