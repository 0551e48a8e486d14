"""RMSNorm (Zhang & Sennrich 2019)."""

import torch
from torch import Tensor, nn
from torch.types import Device

from lm.model.config import ModelConfig
from lm.model.linear import Role
from lm.model.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight``, computed in float32 for any input dtype; with ``is_zero_centered`` times
    ``1 + weight``, and weights start at 0."""

    role: Role = "norm"

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        is_zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.is_zero_centered = eps, is_zero_centered
        start = 0.0 if is_zero_centered else 1.0
        self.weight = nn.Parameter(torch.full((d_model,), start, device=device, dtype=dtype))

    @property
    def gain(self) -> Tensor:
        """The factor of each dimension (d_model,); if zero-centered at least float32, where ``1 + weight`` is exact
        enough."""
        if not self.is_zero_centered:
            return self.weight
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape and dtype."""
        return rms_norm(x, self.gain, self.eps)


def make_norm(
    config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None, width: int | None = None
) -> RMSNorm:
    """Make a norm of a model, by default as wide as the residual stream."""
    return RMSNorm(width or config.d_model, config.norm_eps, device, dtype, is_zero_centered=config.zero_centered_norm)
