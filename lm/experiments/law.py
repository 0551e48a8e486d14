"""The scaling law behind a budget: the best size of a model, and its learning rate.

Fitted to twelve trainings on children's stories with 1e12, 3e12 and 1e13 FLOPs, from 32 to 192 wide, with a vocabulary
of 2,048 (benchmarks/RESULTS.md). At each of the first two budgets, a parabola in the logarithm of the FLOPs per token
has its minimum at the best size; the two trainings of the largest budget agree. Above that it is extrapolation.
"""

import math

_BEST_FLOPS_PER_TOKEN, _BUDGET, _EXPONENT = 9.45e5, 1e12, 0.464
_LR, _WIDTH = 0.005, 256  # tuned for the preset stories-fast (benchmarks/RESULTS.md)


def best_flops_per_token(flops: float) -> float:
    """Return the training FLOPs per token of the model that learns most from ``flops``. The head counts."""
    return _BEST_FLOPS_PER_TOKEN * (flops / _BUDGET) ** _EXPONENT


def best_lr(d_model: int) -> float:
    """Return Muon's peak learning rate for a width. It falls with the root of the width, as in the trainings of the
    law."""
    return float(f"{_LR * math.sqrt(_WIDTH / d_model):.2g}")
