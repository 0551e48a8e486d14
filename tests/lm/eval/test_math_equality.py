"""Equality of formulas, and answers that try to get around it."""

import pytest

from lm.common.errors import UserError
from lm.eval.math_equality import is_math_equal


@pytest.mark.parametrize(
    ("answer", "truth", "is_equal"),
    [
        ("42", " 42.0 ", True),
        ("1,000", "1000", True),
        ("$5", "5", True),
        ("0.1", "0.10", True),
        ("1e3", "1000", True),
        ("-1,234,567.5", "-1234567.5", True),
        ("43", "42", False),
        ("NaN", "NaN", True),
        ("9" * 999, "1", False),
        ("9" * 1001, "9" * 1001, False),
    ],
)
def test_plain_numbers_and_equal_texts_need_no_library(
    monkeypatch: pytest.MonkeyPatch, answer: str, truth: str, is_equal: bool
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    assert is_math_equal(answer, truth) is is_equal


def test_the_library_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(UserError, match=r"install textmill\[math\]"):
        is_math_equal("x", "y")


@pytest.mark.parametrize(
    ("answer", "truth", "is_equal"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", "1/2", True),
        ("x + 1", "1+x", True),
        (r"\sqrt{4}", "2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1, 2)", "(1,2)", True),
        (r"2\pi", "6.28", False),
        ("", "2", False),
        ("1, 2, 3", "2", False),
        ("12", "1,2", False),
        ("1,2", "1, 2", True),
        ("2045", "204_5", False),
        ("204_{5}", "204_5", True),
        ("1 or 2", "2", False),
        (r"1} \boxed{2", "2", False),
        (r"1} \boxed{2} \boxed{3", "2", False),
        ("1} $2$ {3", "2", False),
        ("1} final answer is $2$. I hope it is correct. {", "2", False),
        ("} the answer is 2 {", "2", False),
        ("1$ $2", "2", False),
    ],
)
def test_formulas(answer: str, truth: str, is_equal: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("math_verify", reason="compares formulas")
    assert is_math_equal(answer, truth) is is_equal
    assert not caplog.messages
