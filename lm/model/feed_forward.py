"""Feed-forward networks: SwiGLU and GeGLU (Shazeer 2020); two matrices with silu or squared ReLU (So et al. 2021)."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lm.model.config import ModelConfig
from lm.model.linear import Linear
from lm.model.ops.swiglu import geglu, swiglu


class SwiGLU(nn.Module):
    """``w2(silu(w1 x) ⊙ w3 x)`` (Shazeer 2020). ``join`` makes the input of ``w2`` of the gate and the values."""

    join: Callable[[Tensor, Tensor], Tensor] = staticmethod(swiglu)

    def __init__(self, d_model: int, d_ff: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype, role="feed_forward")
        self.w2 = Linear(d_ff, d_model, device, dtype, role="feed_forward")
        self.w3 = Linear(d_model, d_ff, device, dtype, role="feed_forward")

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the gate ``w1 x`` and the values ``w3 x``, each (..., d_ff)."""
        return self.w1(x), self.w3(x)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape."""
        return self.w2(self.join(*self.project(x)))


class GeGLU(SwiGLU):
    """``w2(gelu(w1 x) ⊙ w3 x)``, with the tanh form of GELU."""

    join = staticmethod(geglu)


class FeedForward(nn.Module):
    """``w2(f(w1 x))``, with ``f`` either silu or relu2, the square of ReLU (So et al. 2021)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Literal["silu", "relu2"],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = Linear(d_model, d_ff, device, dtype, role="feed_forward")
        self.w2 = Linear(d_ff, d_model, device, dtype, role="feed_forward")

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape."""
        inner = self.w1(x)
        return self.w2(F.silu(inner) if self.activation == "silu" else F.relu(inner).square())


def make_feed_forward(
    config: ModelConfig, d_ff: int, device: Device = None, dtype: torch.dtype | None = None
) -> SwiGLU | FeedForward:
    """Make the network that ``config.feed_forward`` names, with the inner width ``d_ff``."""
    if config.feed_forward == "swiglu":
        return SwiGLU(config.d_model, d_ff, device, dtype)
    if config.feed_forward == "geglu":
        return GeGLU(config.d_model, d_ff, device, dtype)
    return FeedForward(config.d_model, d_ff, config.feed_forward, device, dtype)
