"""NorMuon: Muon whose updates are as large for each neuron (Li et al. 2025)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lm.optim.muon import RMS_OF_UPDATES, Muon, orthogonalize

_EPS = 1e-8


class NorMuon(Muon):
    """:class:`lm.optim.muon.Muon`, and a second moment for each row of a matrix.

    Orthogonalized updates have rows of different lengths. Each row is divided by the root of the running mean, with
    rate ``beta2``, of its mean square; then the update gets the root mean square of Muon's. A row is what one neuron
    reads.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, beta2: float = 0.95, **options: Any) -> None:
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 {beta2} must be in [0, 1)")
        super().__init__(params, lr, **options)
        self.beta2 = beta2

    def state_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """Return the shape of a tensor of a parameter's state."""
        return torch.Size([*parameter.shape[:-1], 1]) if name == "row_square" else parameter.shape

    def find_updates(self, momenta: Tensor, params: list[Tensor], is_applied: float | Tensor) -> tuple[Tensor, float]:
        """See :meth:`lm.optim.muon.Muon.find_updates`."""
        updates = orthogonalize(momenta, self.product_dtype)
        for p, square in zip(params, updates.square().mean(-1, keepdim=True), strict=True):
            state = self.state[p]
            if "row_square" not in state:
                state["row_square"] = torch.zeros_like(square)
            state["row_square"].lerp_(square, is_applied * (1 - self.beta2))
        updates = updates / (torch.stack([self.state[p]["row_square"] for p in params]).sqrt() + _EPS)
        norms = updates.norm(dim=(-2, -1), keepdim=True)
        return updates / (norms + _EPS), RMS_OF_UPDATES * math.sqrt(math.prod(momenta.shape[-2:]))
