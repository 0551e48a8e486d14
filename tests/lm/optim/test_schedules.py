"""Learning rate schedules by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.optim.schedules import lr_cosine_schedule, lr_wsd_schedule
from tests.helpers.tensors import FEW_EXAMPLES


@pytest.mark.parametrize(
    ("it", "lr"),
    [
        (0, 0.0),
        (1, 0.1),
        (5, 0.5),
        (9, 0.9),
        (10, 1.0),  # maximum
        (15, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),  # a quarter of the half cosine: cos 45° = sqrt(1/2)
        (20, 0.55),  # middle
        (25, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (30, 0.1),  # end
        (31, 0.1),
        (10**9, 0.1),
    ],
)
def test_cosine_schedule_by_hand(it: int, lr: float) -> None:
    assert lr_cosine_schedule(it, max_lr=1.0, min_lr=0.1, warmup_iters=10, cosine_iters=30) == pytest.approx(lr)


@pytest.mark.parametrize(
    ("it", "lr"), [(0, 0.0), (5, 0.5), (10, 1.0), (79, 1.0), (80, 1.0), (90, 0.55), (95, 0.325), (100, 0.1)]
)
def test_wsd_schedule_by_hand(it: int, lr: float) -> None:
    rate = lr_wsd_schedule(it, max_lr=1.0, min_lr=0.1, warmup_iters=10, decay_iters=20, iters=100)
    assert rate == pytest.approx(lr)


def test_wsd_schedule_at_the_edges() -> None:
    assert lr_wsd_schedule(0, 1.0, 0.1, 0, 1, 10) == 1.0
    assert lr_wsd_schedule(10, 1.0, 0.1, 0, 1, 10) == pytest.approx(0.1)
    assert lr_wsd_schedule(11, 1.0, 0.1, 0, 1, 10) == pytest.approx(0.1)  # constant after the end
    assert [lr_wsd_schedule(it, 1.0, 0.0, 5, 10, 10) for it in (3, 6)] == pytest.approx([0.6, 0.4])


def test_cosine_schedule_without_warmup_or_decay() -> None:
    assert lr_cosine_schedule(0, 1.0, 0.1, 0, 10) == 1.0
    assert lr_cosine_schedule(5, 1.0, 0.1, 5, 5) == 0.1  # no cosine phase
    assert lr_cosine_schedule(0, 1.0, 0.1, 0, 0) == 0.1


@FEW_EXAMPLES
@given(st.integers(0, 30), st.integers(0, 60), st.floats(0, 1), st.floats(0, 1))
def test_cosine_schedule_rises_then_falls(warmup: int, decay: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    rates = [lr_cosine_schedule(it, high, low, warmup, warmup + decay) for it in range(warmup + decay + 5)]
    assert all(x <= y for x, y in itertools.pairwise(rates[:warmup]))
    assert all(x >= y - 1e-12 for x, y in itertools.pairwise(rates[warmup:]))
    assert all(-1e-12 <= rate <= high + 1e-12 for rate in rates)
    assert all(rate >= low - 1e-12 for rate in rates[warmup:])
