"""Budgets as text."""

import pytest

from lm.common.errors import UserError
from lm.experiments.config import Budget, parse_budget


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("90s", 90, "seconds"),
        (" 30m ", 1800, "seconds"),
        ("1h30m", 5400, "seconds"),
        ("30min", 1800, "seconds"),
        ("30 min", 1800, "seconds"),
        ("1 h 30 minutes", 5400, "seconds"),
        ("2 Hours", 7200, "seconds"),
        ("30mins", 1800, "seconds"),
        ("0.5h", 1800, "seconds"),
        ("1d", 86400, "seconds"),
        ("1e16flops", 1e16, "flops"),
        ("2.5 TFLOPs", 2.5e12, "flops"),
        ("50Mtokens", 5e7, "tokens"),
        ("50M tokens", 5e7, "tokens"),
        ("1 btokens", 1e9, "tokens"),
        ("800 k tokens", 8e5, "tokens"),
    ],
)
def test_budgets(text: str, amount: float, unit: str) -> None:
    budget = parse_budget(text)
    assert budget == Budget(pytest.approx(amount), unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "m",
        "0m",
        "-5m",
        "30 minuten",
        "1h 30",
        "30 mi",
        "1.5.2h",
        "0tokens",
        "1e999flops",
        "9" * 400 + "s",
        "1e16",
        "5x",
        "m30",
        "nan s",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="it must be a time such as 30m"):
        parse_budget(text)
