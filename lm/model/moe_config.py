"""Configuration of a mixture of experts. This module does not import torch, so that the command line starts fast."""

import math
from dataclasses import dataclass
from typing import Literal

from lm.common.config import PYDANTIC_CONFIG, bounded_field, validate_fields
from lm.common.errors import UserError


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward network. The ways to balance the load may be combined.

    Sources: Shazeer et al. 2017; Fedus et al. 2021 (Switch); Dai et al. 2024 (DeepSeekMoE: fine-grained and shared
    experts); DeepSeek-AI 2024 (DeepSeek-V3: sigmoid affinities, balance by a bias).
    """

    __pydantic_config__ = PYDANTIC_CONFIG

    num_experts: int = bounded_field(8, ge=2, le=4096)
    """Routed experts in each block, each a feed-forward network of its own."""
    top_k: int = bounded_field(2, ge=1)
    """Experts that compute each token. At most num_experts."""
    d_expert: int | None = bounded_field(None, ge=1)
    """Inner width of an expert. Default: d_ff / (top_k + num_shared_experts), so that a token costs the FLOPs of the
    dense network."""
    num_shared_experts: int = bounded_field(0, ge=0, le=4096)
    """Experts that compute every token, without a gate, beside the routed ones."""
    affinity: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert for a token, from the router's logits. The scores of the chosen experts are their gates."""
    normalized_gates: bool = True
    """Divide the gates of a token by their sum."""
    aux_loss_weight: float = bounded_field(0.01, ge=0, lt=math.inf)
    """Weight of the auxiliary loss of Switch, which balances the load of the experts. 0 turns it off."""
    z_loss_weight: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Weight of the mean squared log-sum-exp of the router's logits (Zoph et al. 2022). Keeps the logits small."""
    bias_update_rate: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Loss-free balance: after each step, a bias that only decides which experts are chosen rises by this much for
    experts below the mean load, and falls for those above. 0.001 is usual in long trainings, 0.003 in short ones, with
    aux_loss_weight 0. 0: no bias."""
    capacity_factor: float | None = bounded_field(None, gt=0, lt=math.inf)
    """In pretraining, an expert takes at most this multiple of its fair share of a micro-batch of a process, the first
    tokens first; the others skip it. Default: no choice is dropped."""
    num_dense_layers: int = bounded_field(0, ge=0)
    """First blocks that keep the dense network of width d_ff. Less than num_layers."""

    def __post_init__(self) -> None:
        validate_fields(self, "model.moe")
        if self.top_k > self.num_experts:
            raise UserError(f"model.moe.top_k {self.top_k} must be at most num_experts {self.num_experts}.")
        if self.top_k == 1 and self.normalized_gates:
            raise UserError(
                "model.moe.top_k is 1, and a single gate divided by itself is always 1: the router would not learn. "
                "Set normalized_gates to false."
            )

    def expert_width(self, d_ff: int) -> int:
        """Return ``d_expert`` with its default filled in."""
        return self.d_expert or d_ff // (self.top_k + self.num_shared_experts)
