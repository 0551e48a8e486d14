"""Rotary position embeddings (Su et al. 2021)."""

import math

import torch
from torch import Tensor
from torch.types import Device

from lm.model.buffers import BuffersKeepDtype
from lm.model.rope_config import RopeScaling


class RotaryEmbedding(BuffersKeepDtype):
    """Rotates the pairs (2i, 2i+1) of a head by the angle ``position · theta^(-2i/d_k)``: Meta's interleaved RoPE.

    Cosines and sines are float32, also in a model that is cast. ``d_k`` must be even. ``scaling`` slows the rotation,
    see :class:`lm.model.rope_config.RopeScaling`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, theta: float, d_k: int, max_seq_len: int, device: Device = None, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        frequencies = rotary_frequencies(theta, d_k, scaling, device)
        angles = torch.outer(torch.arange(max_seq_len, device=device, dtype=torch.float32), frequencies)
        # Not in the state dict, because they follow from the config.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """Rotate ``x`` (..., T, d_k) by its positions (..., T), by default 0 … T-1. Same shape and dtype."""
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


def rotary_frequencies(theta: float, d_k: int, scaling: RopeScaling | None = None, device: Device = None) -> Tensor:
    """Return the frequencies of the pairs of a head (K/2), float32, in radians a token.

    ``scaling`` divides them by its factor, except for the share of each that is kept.
    """
    frequencies = theta ** (-torch.arange(0, d_k, 2, device=device, dtype=torch.float32) / d_k)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = frequencies * (scaling.original_context_length / (2 * math.pi))
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * ((1 - kept) / scaling.factor + kept)
