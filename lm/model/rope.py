"""Rotary position embeddings (Su et al. 2021).

Shapes: T tokens, K head_dim, P = K / 2 pairs of a head, or fewer if only a part of it is rotated.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from lm.model.config import RopeScaling
from lm.model.linear import BuffersKeepDtype


class RotaryEmbedding(BuffersKeepDtype):
    """Rotates the pairs (2i, 2i+1) of a head by the angle ``position · theta^(-2i/K)``: Meta's interleaved RoPE.

    Cosines and sines are float32, also in a model that is cast. ``head_dim`` must be even. ``scaling`` slows the
    rotation, see :class:`lm.model.config.RopeScaling`. Only the first ``rotary_dim`` dimensions are rotated, by default
    all: the angle of the other pairs is 0.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        theta: float,
        head_dim: int,
        max_seq_len: int,
        device: Device = None,
        scaling: RopeScaling | None = None,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.theta, self.scaling, self.rotary_dim = theta, scaling, rotary_dim or head_dim
        shape = (max_seq_len, head_dim // 2)
        # Not in the state dict, because they follow from the config.
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(shape, device=device, dtype=torch.float32), persistent=False)
        if not self.cos.is_meta:  # there, arithmetic would import torch.compile, for two seconds
            self.fill(device)

    def fill(self, device: Device = None) -> None:
        """Compute the cosines and sines on ``device``, also of a module that was made on the meta device."""
        length, num_pairs = self.cos.shape
        frequencies_P = rotary_frequencies(self.theta, self.rotary_dim, self.scaling, device)
        angles_TP = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies_P)
        self.cos, self.sin = angles_TP.cos(), angles_TP.sin()
        if (magnitude := rotary_magnitude(self.scaling)) != 1:
            self.cos, self.sin = self.cos * magnitude, self.sin * magnitude
        if (num_still := num_pairs - len(frequencies_P)) > 0:
            self.cos, self.sin = F.pad(self.cos, (0, num_still), value=1.0), F.pad(self.sin, (0, num_still))

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
    theta: float, rotary_dim: int, scaling: RopeScaling | None = None, device: Device = None
) -> Tensor:
    """Return the frequencies (P,) of the pairs of a head, float32, in radians per token.

    ``scaling`` divides the low frequencies by its factor, and keeps the high ones; longrope divides each by its own.
    """
    frequencies_P = theta ** (-torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim)
    if scaling is None:
        return frequencies_P
    if scaling.kind == "linear":
        return frequencies_P / scaling.factor
    if scaling.kind == "longrope":
        return frequencies_P / torch.tensor(scaling.divisors, device=device, dtype=torch.float32)
    if scaling.kind == "llama3":
        turns_P = frequencies_P * (scaling.original_context_length / (2 * math.pi))
        kept_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        first, last = (
            _index_of_turns(turns, theta, rotary_dim, scaling) for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        # Whole numbers, as in the paper's code.
        first, last = max(math.floor(first), 0), min(math.ceil(last), rotary_dim - 1)
        indices_P = torch.arange(len(frequencies_P), device=device, dtype=torch.float32)
        kept_P = 1 - (indices_P - first) / max(last - first, 0.001)
    kept_P = kept_P.clamp(0, 1)
    return frequencies_P * ((1 - kept_P) / scaling.factor + kept_P)


def _index_of_turns(turns: float, theta: float, rotary_dim: int, scaling: RopeScaling) -> float:
    """Return the index of the pair that turns so often in the original context; it lies between two pairs."""
    return rotary_dim * math.log(scaling.original_context_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotary_magnitude(scaling: RopeScaling | None) -> float:
    """Return the factor by which rotated queries and keys grow. Of YaRN it keeps the entropy of longer attention."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1 if scaling.kind == "yarn" else 1.0
