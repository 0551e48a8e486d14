"""Decoupled weight decay, also the cautious form (Chen et al. 2025, "Cautious Weight Decay")."""

import torch
from torch import Tensor


def decay_weights(weights: list[Tensor], updates: list[Tensor], factor: float | Tensor, is_cautious: bool) -> None:
    """Multiply ``weights`` by ``factor``, at most 1, in place.

    With ``is_cautious``, only weights that the update moves toward 0 shrink. ``updates`` are what the optimizer then
    subtracts, or have the same signs. An update or a weight of 0 counts as toward 0.
    """
    if not is_cautious:
        torch._foreach_mul_(weights, factor)
        return
    for weight, update in zip(weights, updates, strict=True):
        weight.copy_(torch.where(weight * update >= 0, weight * factor, weight))
