"""The scaling law behind a budget: the best size of a model, and its learning rate.

Fitted to trainings on children's stories with a vocabulary of 2,048: the minima at 1e12 and 3e12 FLOPs of twelve
trainings (benchmarks/RESULTS.md), and those at 3e12, 1e13 and 3e13 FLOPs of the 45 of the sweep isoflop
(docs/experiments.md). Above that it is extrapolation.
"""

import math

_BEST_FLOPS_PER_TOKEN, _BUDGET, _EXPONENT = 8.8e5, 1e12, 0.468
_LR, _WIDTH = 0.005, 256  # tuned for the preset stories-fast (benchmarks/RESULTS.md)


def best_flops_per_token(flops: float) -> float:
    """Return the training FLOPs per token of the model that learns most from ``flops``. The head counts."""
    return _BEST_FLOPS_PER_TOKEN * (flops / _BUDGET) ** _EXPONENT


def best_lr(d_model: int) -> float:
    """Return Muon's peak learning rate for a width. It falls with the root of the width, as in the trainings of the
    law."""
    return float(f"{_LR * math.sqrt(_WIDTH / d_model):.2g}")
