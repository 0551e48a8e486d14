"""Rotary position embeddings (Su et al. 2021).

Shapes: T tokens, K head_dim, P = K / 2 pairs.
"""

import math

import torch
from torch import Tensor
from torch.types import Device

from lm.model.config import RopeScaling
from lm.model.linear import BuffersKeepDtype


class RotaryEmbedding(BuffersKeepDtype):
    """Rotates the pairs (2i, 2i+1) of a head by the angle ``position · theta^(-2i/K)``: Meta's interleaved RoPE.

    Cosines and sines are float32, also in a model that is cast. ``head_dim`` must be even. ``scaling`` slows the
    rotation, see :class:`lm.model.config.RopeScaling`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, theta: float, head_dim: int, max_seq_len: int, device: Device = None, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        cos_TP, sin_TP = (torch.empty(max_seq_len, head_dim // 2, device=device, dtype=torch.float32) for _ in range(2))
        if not cos_TP.is_meta:  # there, arithmetic would import torch.compile, for two seconds
            frequencies_P = rotary_frequencies(theta, head_dim, scaling, device)
            angles_TP = torch.outer(torch.arange(max_seq_len, device=device, dtype=torch.float32), frequencies_P)
            cos_TP, sin_TP = angles_TP.cos(), angles_TP.sin()
        # Not in the state dict, because they follow from the config.
        self.register_buffer("cos", cos_TP, persistent=False)
        self.register_buffer("sin", sin_TP, persistent=False)

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """Rotate ``x`` (..., T, K) by its positions (..., T), by default 0 … T-1. Same shape and dtype."""
        if token_positions is None:
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        else:
            cos, sin = self.cos[token_positions], self.sin[token_positions]
        pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # torch.compile does not support complex numbers
            even, odd = pairs.unbind(-1)
            rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        else:
            rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
        return rotated.flatten(-2).to(x.dtype)


def rotary_frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None = None, device: Device = None
) -> Tensor:
    """Return the frequencies (P,) of the pairs of a head, float32, in radians per token.

    ``scaling`` divides the low frequencies by its factor, and keeps the high ones.
    """
    frequencies_P = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies_P
    if scaling.kind == "linear":
        return frequencies_P / scaling.factor
    turns_P = frequencies_P * (scaling.original_context_length / (2 * math.pi))
    kept_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_P = kept_P.clamp(0, 1)
    return frequencies_P * ((1 - kept_P) / scaling.factor + kept_P)
