"""Linear and embedding layers (CS336 assignment 1, section 3)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lm.model.ops.matmul import linear
from lm.model.roles import Role


class Linear(nn.Module):
    """``y = x Wᵀ``, with ``has_bias`` plus a bias. ``weight`` is (out_features, in_features), initialized from
    N(0, 2 / (in + out)) truncated at ±3 standard deviations, ``bias`` (out_features,) with zeros.

    ``role`` is the weight's role in a model. None: the layer is not part of one.
    """

    bias_role: Role = "bias"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        role: Role | None = None,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.role = role
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        truncated_normal_(self.weight, math.sqrt(2 / (in_features + out_features)))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)  # autocast keeps the bias in float32


class Embedding(nn.Module):
    """Look up rows of ``weight`` (num_embeddings, embedding_dim), initialized from N(0, 1) truncated at ±3."""

    role: Role = "embedding"

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        truncated_normal_(self.weight, 1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Integer ids (...) → (..., embedding_dim)."""
        return F.embedding(token_ids, self.weight)


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill ``weight`` in place from N(0, std²) truncated at ±3 std."""
    nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
