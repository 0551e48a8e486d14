"""Mixture of experts in place of the feed-forward network.

Sources: Shazeer et al. 2017 (gates); Fedus et al. 2021 (Switch: auxiliary loss, capacity); Dai et al. 2024
(DeepSeekMoE: shared experts); DeepSeek-AI 2024 (DeepSeek-V3: sigmoid affinities, a bias in the choice).
Shapes: N tokens, D d_model, F inner width of an expert, E experts, A experts of a token (top_k).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig
from lm.model.feed_forward import make_feed_forward
from lm.model.initialization import truncated_normal_
from lm.model.linear import BuffersKeepDtype, Linear, Role
from lm.model.ops.experts import Activation, ExpertWeights, mix_experts
from lm.model.ops.matmul import linear

_EPS = 1e-20  # sigmoid affinities may all be 0 in float32


class Routing(NamedTuple):
    """How a forward pass used the experts. The trainer balances the load with it."""

    counts: Tensor
    """(E,) float32: tokens routed to each expert, before the capacity drops any."""
    affinity_sums: Tensor
    """(E,): sum over the tokens of the affinities, which sum to 1 for each token. Has a gradient."""
    z_sum: Tensor
    """Scalar: sum over the tokens of the squared log-sum-exp of the logits. Has a gradient."""
    dropped: Tensor
    """Scalar, float32: choices that a capacity dropped."""


class Experts(nn.Module):
    """Matrices of the feed-forward networks of E experts: ``w1`` and ``w3`` (E, F, D), ``w2`` (E, D, F)."""

    role: Role = "feed_forward"

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        d_expert = moe.expert_width(config.d_ff)
        self.activation: Activation = "relu2" if config.feed_forward == "relu2" else "silu"

        def make_stack(rows: int, columns: int) -> nn.Parameter:
            stack = nn.Parameter(torch.empty(moe.num_experts, rows, columns, device=device, dtype=dtype))
            truncated_normal_(stack, math.sqrt(2 / (rows + columns)))
            return stack

        self.w1 = make_stack(d_expert, config.d_model)
        self.w2 = make_stack(config.d_model, d_expert)
        self.w3 = make_stack(d_expert, config.d_model) if config.feed_forward == "swiglu" else None

    def forward(self, x_ND: Tensor, chosen_NA: Tensor, gates_NA: Tensor) -> Tensor:
        """Return :func:`lm.model.ops.experts.mix_experts` of these experts."""
        return mix_experts(x_ND, chosen_NA, gates_NA, ExpertWeights(self.w1, self.w2, self.w3), self.activation)


class MoE(BuffersKeepDtype):
    """Sends each token to the ``top_k`` experts with the highest affinity, and to all shared experts.

    Affinities, in float32, are the softmax or the sigmoid of the router's logits. With a bias, the experts with the
    highest sum of affinity and bias are chosen; the gates do not contain the bias. Ties go to the lower index.

    After :meth:`record_routings`, forward passes with gradients are those of a training: each adds its
    :class:`Routing` to ``routings``, and ``capacity_factor`` drops choices. Not in inference: there, the output of a
    token must not depend on other tokens. Raises UserError if ``config`` has no experts.
    """

    expert_bias: Tensor | None
    """(E,) float32 buffer, also in a model that is cast. None if ``bias_update_rate`` is 0. The trainer updates it."""

    def __init__(self, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise UserError("A mixture of experts needs model.moe.")
        self.config = config.moe
        self.router = Linear(config.d_model, self.config.num_experts, device, dtype, role="router")
        bias = torch.zeros(self.config.num_experts, device=device) if self.config.bias_update_rate else None
        self.register_buffer("expert_bias", bias)
        self.experts = Experts(config, config.moe, device, dtype)
        # Side by side, shared experts are one wide network.
        shared_width = self.config.num_shared_experts * self.config.expert_width(config.d_ff)
        self.shared = make_feed_forward(config, shared_width, device, dtype) if shared_width else None
        has_gate = shared_width > 0 and self.config.shared_gate
        self.shared_gate = Linear(config.d_model, 1, device, dtype, role="router") if has_gate else None
        self.routings: list[Routing] | None = None
        self._padding: Tensor | None = None

    def record_routings(self, padding: Tensor | None = None) -> None:
        """Forget the routings, and record those of the next passes with gradients.

        Where ``padding`` bool (...) is true, no token is routed or counted in them; its shape is that of the tokens.
        """
        self.routings, self._padding = [], padding

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → same shape."""
        x_ND = x.flatten(0, -2)
        logits_NE = self._logits(x_ND)
        affinities_NE = logits_NE.softmax(-1) if self.config.affinity == "softmax" else logits_NE.sigmoid()
        chosen_NA, gates_NA = self._choose(affinities_NE)
        if self.routings is not None and torch.is_grad_enabled():
            chosen_NA, routing = self._route(logits_NE, affinities_NE, chosen_NA)
            # Activation checkpointing runs the block again in the backward pass; torch.compile does without this.
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
                self.routings.append(routing)
        out_ND: Tensor = self.experts(x_ND, chosen_NA, gates_NA)
        if self.shared is not None:
            shared_ND = self.shared(x_ND)
            if self.shared_gate is not None:
                shared_ND = self.shared_gate(x_ND).sigmoid() * shared_ND
            out_ND = out_ND + shared_ND
        return out_ND.view(x.shape)

    def _route(self, logits_NE: Tensor, affinities_NE: Tensor, chosen_NA: Tensor) -> tuple[Tensor, Routing]:
        """Return the choices without padding and those over the capacity, and the routing."""
        padding = None if self._padding is None else self._padding.flatten()
        if padding is not None:
            chosen_NA = chosen_NA.masked_fill(padding[:, None], self.config.num_experts)
        experts_E = torch.arange(self.config.num_experts, device=chosen_NA.device)
        counts_E = (chosen_NA.flatten()[:, None] == experts_E).sum(0, dtype=torch.float32)
        dropped = counts_E.new_zeros(())
        if self.config.capacity_factor is not None:
            capacity = math.ceil(self.config.capacity_factor * chosen_NA.numel() / self.config.num_experts)
            chosen_NA, dropped = drop_over_capacity(chosen_NA, counts_E, capacity)
        if self.config.affinity == "sigmoid":
            affinities_NE = affinities_NE / (affinities_NE.sum(-1, keepdim=True) + _EPS)
        z_N = logits_NE.logsumexp(-1).square()
        if padding is not None:
            affinities_NE, z_N = affinities_NE.masked_fill(padding[:, None], 0), z_N.masked_fill(padding, 0)
        return chosen_NA, Routing(counts_E, affinities_NE.sum(0), z_N.sum(), dropped)

    def _logits(self, x_ND: Tensor) -> Tensor:
        """Return the router's logits (N, E), in float32 also under autocast: rounding would change choices."""
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            return linear(x_ND.to(dtype), self.router.weight.to(dtype))

    def _choose(self, affinities_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their gates, (N, A) each."""
        scores_NE = affinities_NE.detach()
        if self.expert_bias is not None:
            scores_NE = scores_NE + self.expert_bias
        # topk breaks ties in any order.
        chosen_NA = scores_NE.sort(stable=True, dim=-1, descending=True).indices[:, : self.config.top_k].contiguous()
        gates_NA = affinities_NE.gather(-1, chosen_NA)
        if self.config.normalized_gates:
            gates_NA = gates_NA / (gates_NA.sum(-1, keepdim=True) + _EPS)
        return chosen_NA, gates_NA


def drop_over_capacity(chosen_NA: Tensor, counts_E: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Replace all but the first ``capacity`` choices of each expert by E, which stands for no expert, as in padding.

    The first tokens come first. ``counts_E`` are the counts of ``chosen_NA``. Return the choices, and the number of
    replaced ones, a float32 scalar.
    """
    flat = chosen_NA.flatten()
    order = flat.argsort(stable=True)
    first = F.pad(counts_E.cumsum(0) - counts_E, (0, 1)).long()  # place of each expert's first choice in this order
    ranks = torch.arange(len(flat), device=flat.device) - first[flat[order]]
    is_dropped = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, ranks >= capacity)
    kept_NA = flat.masked_fill(is_dropped, len(counts_E)).view(chosen_NA.shape)
    return kept_NA, (counts_E - capacity).clamp(min=0).sum()
