"""Conversion of the loss to bits per byte."""

import math

import pytest

from lm.eval.loss import bits_per_byte


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(2), 1.0) == pytest.approx(1.0)
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)  # bytes at random
    assert bits_per_byte(math.log(256), 4.0) == pytest.approx(2.0)
