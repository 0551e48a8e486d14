"""Expressions: equal to Python's arithmetic, and nothing but arithmetic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.experiments.expression import evaluate_expression

VALUES = {"train.batch_size": 16, "budget": 1e12, "text": "post", "flag": True}


def _sum(parts: tuple[tuple[str, float], str, tuple[str, float]]) -> tuple[str, float]:
    (left, a), sign, (right, b) = parts
    return f"({left} {sign} {right})", {"+": a + b, "-": a - b, "*": a * b}[sign]


_LEAVES = st.one_of(st.integers(-99, 99).map(lambda number: (f"({number})", number)), st.just(("train.batch_size", 16)))
_EXPRESSIONS = st.recursive(
    _LEAVES, lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(_sum), max_leaves=8
)


@given(_EXPRESSIONS)
def test_values_are_those_of_arithmetic(drawn: tuple[str, int]) -> None:
    text, value = drawn
    assert evaluate_expression(text, VALUES) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("budget / 5e11", 2),
        ("round(7.6)", 8),
        ("max(1, 3 // 2, 7 % 4)", 3),
        ("floor(1.5) + ceil(1.5) - min(1, 2)", 2),
        ("sqrt(train.batch_size / 4)", 2),
        ("log2(8) ** 2", 9),
        ("-2 ** 2", -4),
        ("0.01 * sqrt(train.batch_size)", 0.04),
    ],
)
def test_operators_and_functions(text: str, value: float) -> None:
    result = evaluate_expression(text, VALUES)
    assert result == pytest.approx(value)
    assert isinstance(result, int) == (value == math.floor(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "1 / 0",
        "train.batch_sizes",
        "text + 1",
        "flag + 1",
        "'a'",
        "True",
        "9 ** 9 ** 9",
        "sqrt(-1)",
        "(-8) ** 0.5",
        "__import__('os')",
        "budget.__class__",
        "max.__self__",
        "[1][0]",
        "(lambda: 1)()",
        "round(1.5, ndigits=1)",
        "max()",
        "1e308 * 10",
        "(" * 300 + "1" + ")" * 300,  # longer than 500 characters
        "(" * 240 + "1" + ")" * 240,  # deeper than Python's parser goes
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expression"):
        evaluate_expression(text, VALUES)
