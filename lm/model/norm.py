"""RMSNorm (Zhang & Sennrich 2019)."""

import torch
from torch import Tensor, nn
from torch.types import Device

from lm.model.linear import Role
from lm.model.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight``, computed in float32 for any input dtype."""

    role: Role = "norm"

    def __init__(
        self, d_model: int, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
