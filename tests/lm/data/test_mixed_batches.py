"""Mixed batches: the counts of each source, limits of epochs, orders, and purity in seed and step."""

from collections import Counter
from fractions import Fraction
from math import ceil, floor
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.mixed_batches import MixedBatches, MixedSchedule, MixedSource, normalize_weights

EXAMPLES = settings(deadline=None, max_examples=60)
WEIGHTS = st.lists(st.one_of(st.integers(0, 5), st.integers(1, 10_000)), min_size=1, max_size=7).filter(any)
ORDERS: list[Literal["random", "shuffled_epochs"]] = ["random", "shuffled_epochs"]


def fractions_of(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


def reference_counts(weights: list[Fraction], batch_size: int, steps: int) -> list[list[int]]:
    """The counts of each step by the definition of PD²: windows in exact fractions, and a group deadline that follows
    the chain of overlapping windows of two slots."""
    shares = [weight * batch_size for weight in weights]
    rates = [share - floor(share) for share in shares]
    served = [0] * len(weights)
    result = []

    def deadline(rate: Fraction, number: int) -> int:
        return ceil(number / rate)

    def does_overlap(rate: Fraction, number: int) -> bool:
        return ceil(number / rate) > floor(number / rate)

    def group_deadline(rate: Fraction, number: int) -> int:
        if rate < Fraction(1, 2):
            return 0
        end = deadline(rate, number)
        while True:
            if end == deadline(rate, number) and not does_overlap(rate, number):
                return end
            number += 1
            length = deadline(rate, number) - floor((number - 1) / rate)
            if length == 3:
                return deadline(rate, number) - 1
            end = deadline(rate, number)

    for slot in range(steps):
        ready = []
        for index, rate in enumerate(rates):
            number = served[index] + 1
            if rate and floor((number - 1) / rate) <= slot:
                key = (deadline(rate, number), not does_overlap(rate, number), -group_deadline(rate, number), index)
                ready.append(key)
        chosen = {key[-1] for key in sorted(ready)[: int(sum(rates))]}
        served = [count + (index in chosen) for index, count in enumerate(served)]
        result.append([floor(share) + (index in chosen) for index, share in enumerate(shares)])
    return result


@EXAMPLES
@given(WEIGHTS, st.integers(1, 40))
def test_counts_are_those_of_the_reference_and_less_than_one_from_the_weights(
    weights: list[int], batch_size: int
) -> None:
    """In each step, and in all steps up to each."""
    shares = fractions_of(weights)
    schedule = MixedSchedule(shares, batch_size, [None] * len(shares))
    before = [0] * len(shares)
    for step, expected in enumerate(reference_counts(shares, batch_size, 40)):
        totals, counts = schedule.counts(step)
        assert list(counts) == expected and list(totals) == before
        assert sum(counts) == batch_size
        assert all(abs(count - share * batch_size) < 1 for count, share in zip(counts, shares, strict=True))
        assert all(abs(total - share * batch_size * step) < 1 for total, share in zip(totals, shares, strict=True))
        before = [sum(pair) for pair in zip(before, counts, strict=True)]


LIMITED = st.lists(
    st.tuples(st.integers(1, 50), st.one_of(st.none(), st.integers(0, 200))), min_size=2, max_size=5
).filter(lambda sources: any(limit is None for _, limit in sources))


@EXAMPLES
@given(LIMITED, st.integers(1, 30))
def test_a_source_at_its_limit_gives_its_share_to_the_others_in_proportion(
    sources: list[tuple[int, int | None]], batch_size: int
) -> None:
    shares, limits = fractions_of([weight for weight, _ in sources]), [limit for _, limit in sources]
    schedule = MixedSchedule(shares, batch_size, limits)
    phase_step, phase_totals, phase_active = 0, [0] * len(shares), [limit != 0 for limit in limits]
    for step in range(60):
        totals, counts = schedule.counts(step)
        assert sum(counts) == batch_size
        after = [sum(pair) for pair in zip(totals, counts, strict=True)]
        assert all(limit is None or total <= limit for total, limit in zip(after, limits, strict=True))
        active = [limit is None or total < limit for total, limit in zip(totals, limits, strict=True)]
        if active != phase_active:
            phase_step, phase_totals, phase_active = step, list(totals), active
        rest = sum((share for share, is_active in zip(shares, active, strict=True) if is_active), Fraction(0))
        for index, share in enumerate(shares):
            expected = share / rest * batch_size * (step - phase_step) if active[index] else Fraction(0)
            assert abs(expected - totals[index] + phase_totals[index]) < 1
    ended = [limit for limit, is_active in zip(limits, active, strict=True) if not is_active]
    totals = schedule.counts(60)[0]
    assert sorted(total for total, is_active in zip(totals, active, strict=True) if not is_active) == sorted(
        limit for limit in ended if limit is not None
    ), "every limit is used up"


@EXAMPLES
@given(LIMITED, st.lists(st.integers(0, 3000), min_size=1, max_size=6))
def test_a_step_does_not_depend_on_the_steps_asked_for_before(
    sources: list[tuple[int, int | None]], steps: list[int]
) -> None:
    shares, limits = fractions_of([weight for weight, _ in sources]), [limit for _, limit in sources]
    schedule = MixedSchedule(shares, 7, limits)
    for step in steps:
        assert schedule.counts(step) == MixedSchedule(shares, 7, limits).counts(step)


def test_limits_of_all_sources_are_a_user_error() -> None:
    schedule = MixedSchedule(fractions_of([1, 2]), 4, [3, 3])
    with pytest.raises(UserError, match=r"All sources of data\.mix have reached max_epochs"):
        schedule.counts(2)
    with pytest.raises(UserError, match=r"reads 80 sequences, and data\.mix allows 18: every source has max_epochs"):
        make([source("a", 100, max_epochs=1), source("b", 100, max_epochs=1)], steps=20)


def test_a_training_may_use_up_all_limits() -> None:
    batches = make([source("a", 101, 3, max_epochs=1), source("b", 101, 1, max_epochs=1)], "shuffled_epochs", steps=5)
    starts = sorted(start for step in range(5) for start in batches.starts(step))
    assert starts == [*range(0, 100, 10), *range(101, 201, 10)]
    assert batches.sequences(5) == [10, 10]


def source(name: str, tokens: int, weight: float | None = None, max_epochs: float | None = None) -> MixedSource:
    return MixedSource(name, weight, max_epochs, tokens, 0, 1.0)


def make(
    sources: list[MixedSource],
    order: Literal["random", "shuffled_epochs"] = "random",
    seed: int = 0,
    steps: int = 1000,
) -> MixedBatches:
    return MixedBatches(sources, 4, 10, order, seed, steps)


def test_weights_are_exact_and_default_to_the_share_of_the_tokens() -> None:
    assert normalize_weights([source("a", 1, 0.1), source("b", 1, 0.2)]) == [Fraction(1, 3), Fraction(2, 3)]
    assert normalize_weights([source("a", 300), source("b", 100)]) == [Fraction(3, 4), Fraction(1, 4)]
    assert normalize_weights([source("a", 300), source("b", 100, 0.75)]) == [Fraction(1, 2)] * 2


@pytest.mark.parametrize("order", ORDERS)
def test_sequences_lie_inside_their_source_and_each_epoch_has_all_windows(
    order: Literal["random", "shuffled_epochs"],
) -> None:
    sources = [source("a", 101, 3), source("b", 55, 1), source("c", 7, 0)]
    batches = make(sources, order)
    starts = [start for step in range(60) for start in batches.starts(step)]
    assert batches.sequences(60) == [180, 60, 0]
    assert sum(start <= 91 for start in starts) == 180
    assert sum(101 <= start <= 146 for start in starts) == 60
    if order == "shuffled_epochs":
        counts = Counter(starts)
        assert counts == {**dict.fromkeys(range(0, 100, 10), 18), **dict.fromkeys(range(101, 151, 10), 12)}


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_a_function_of_seed_and_step(order: Literal["random", "shuffled_epochs"]) -> None:
    sources = [source("a", 1001, 3), source("b", 555, 1, max_epochs=0.5)]
    batches = make(sources, order)
    for step in (40, 3, 3, 0, 7):
        assert batches.starts(step) == make(sources, order).starts(step)
    assert make(sources, order, seed=1).starts(3) != batches.starts(3)
    rows = np.array([batches.starts(step) for step in range(3, 8)])
    assert (np.diff(rows) < 0).any(), "sources are not in their order inside a batch"


def test_another_source_does_not_change_the_order_of_a_source() -> None:
    def windows(batches: MixedBatches) -> list[int]:
        return sorted(start for step in range(2) for start in batches.starts(step) if start < 101)

    alone = make([source("a", 101)], "shuffled_epochs")
    beside = make([source("a", 101, 1), source("b", 101, 1)], "shuffled_epochs")
    assert set(windows(beside)) < set(windows(alone)), "the first four windows of the same epoch"


def test_a_source_shorter_than_the_context_is_named() -> None:
    with pytest.raises(UserError, match=r"training text of data\.mix\.b has 10 tokens, too few for a context of 10"):
        make([source("a", 100), source("b", 10)])
    make([source("a", 100), source("b", 10, 0)])  # only measured
