"""The budget of a training: an amount of time, of FLOPs or of tokens."""

import re
from dataclasses import dataclass
from typing import Literal

from lm.common.errors import UserError

BudgetUnit = Literal["seconds", "flops", "tokens"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_TIME = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kMGBT]?)\s*(flops?|tokens?)", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """How much time, FLOPs or tokens a training may take."""

    amount: float
    unit: BudgetUnit


def parse_budget(text: str) -> Budget:
    """Read a budget: a time such as 90s, 30m, 2h or 1h30m; FLOPs such as 1e16flops; tokens such as 50Mtokens.

    Raises UserError for anything else, and for a budget of nothing.
    """
    text = text.strip()
    if _TIME.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
        if 0 < seconds < float("inf"):
            return Budget(seconds, "seconds")
    if match := _AMOUNT.fullmatch(text):
        number, prefix, name = match.groups()
        amount = float(number) * _PREFIXES[prefix if prefix in _PREFIXES else prefix.swapcase()]
        if 0 < amount < float("inf"):
            return Budget(amount, "flops" if name.lower().startswith("flop") else "tokens")
    raise UserError(
        f"budget is {text!r}; it must be a time such as 30m or 2h, FLOPs such as 1e16flops, or tokens such as "
        "50Mtokens."
    )
