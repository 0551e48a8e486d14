"""Mixture of experts in place of the feed-forward network.

Sources: Shazeer et al. 2017 (gates); Fedus et al. 2021 (Switch: auxiliary loss, capacity); Dai et al. 2024
(DeepSeekMoE: shared experts); DeepSeek-AI 2024 (DeepSeek-V3: sigmoid affinities, a bias in the choice).
Shapes in comments: N tokens, D d_model, d width of an expert, E experts, k chosen experts.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lm.model.buffers import BuffersKeepDtype
from lm.model.feed_forward import FeedForward, SwiGLU
from lm.model.linear import Linear, truncated_normal_
from lm.model.moe_config import MoEConfig
from lm.model.ops.experts import Activation, ExpertWeights, mix_experts
from lm.model.ops.matmul import linear
from lm.model.roles import Role

_EPS = 1e-20  # sigmoid affinities may all be 0 in float32


class Routing(NamedTuple):
    """How a forward pass used the experts. The trainer balances the load with it."""

    counts: Tensor
    """(E,) float32: tokens that chose each expert, also those that its capacity dropped."""
    affinity_sums: Tensor
    """(E,): sum over the tokens of the affinities, which sum to 1 for each token. Has a gradient."""
    z_sum: Tensor
    """Scalar: sum over the tokens of the squared log-sum-exp of the logits. Has a gradient."""
    dropped: Tensor
    """Scalar, float32: choices that a capacity dropped."""


class Experts(nn.Module):
    """Matrices of the feed-forward networks of E experts: ``w1`` and ``w3`` (E, d, D), ``w2`` (E, D, d)."""

    role: Role = "feed_forward"

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_expert: int,
        feed_forward: Literal["swiglu", "silu", "relu2"],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation: Activation = "relu2" if feed_forward == "relu2" else "silu"

        def make_stack(rows: int, columns: int) -> nn.Parameter:
            stack = nn.Parameter(torch.empty(num_experts, rows, columns, device=device, dtype=dtype))
            truncated_normal_(stack, math.sqrt(2 / (rows + columns)))
            return stack

        self.w1 = make_stack(d_expert, d_model)
        self.w2 = make_stack(d_model, d_expert)
        self.w3 = make_stack(d_expert, d_model) if feed_forward == "swiglu" else None

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Return :func:`lm.model.ops.experts.mix_experts` of these experts."""
        return mix_experts(x, chosen, gates, ExpertWeights(self.w1, self.w2, self.w3), self.activation)


class MoE(BuffersKeepDtype):
    """Sends each token to the ``top_k`` experts with the highest affinity, and to all shared experts.

    Affinities, in float32, are the softmax or the sigmoid of the router's logits. With a bias, the experts with the
    highest sum of affinity and bias are chosen; the gates do not contain the bias. Ties go to the lower index.
    """

    expert_bias: Tensor | None
    """(E,) float32 buffer, also in a model that is cast. None if ``bias_update_rate`` is 0. The trainer updates it."""

    def __init__(
        self,
        config: MoEConfig,
        d_model: int,
        d_ff: int,
        feed_forward: Literal["swiglu", "silu", "relu2"] = "swiglu",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, width = config, config.expert_width(d_ff)
        self.router = Linear(d_model, config.num_experts, device, dtype, role="router")
        bias = torch.zeros(config.num_experts, device=device) if config.bias_update_rate else None
        self.register_buffer("expert_bias", bias)
        self.experts = Experts(config.num_experts, d_model, width, feed_forward, device, dtype)
        self.shared: SwiGLU | FeedForward | None = None
        if shared_width := config.num_shared_experts * width:  # side by side, shared experts are one wide network
            self.shared = (
                SwiGLU(d_model, shared_width, device, dtype)
                if feed_forward == "swiglu"
                else FeedForward(d_model, shared_width, feed_forward, device, dtype)
            )

    def forward(
        self, x: Tensor, returns_routing: bool = False, padding: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Routing]:
        """(..., D) → same shape; with ``returns_routing``, as in training, also the :class:`Routing` of the tokens.

        Only then does ``capacity_factor`` drop choices: in inference, the output of a token must not depend on other
        tokens. Where ``padding`` (...) bool is true, no token is routed or counted.
        """
        tokens = x.flatten(0, -2)
        logits = self._logits(tokens)
        affinities = logits.softmax(-1) if self.config.affinity == "softmax" else logits.sigmoid()
        chosen, gates = self._choose(affinities)
        if padding is not None:
            chosen = chosen.masked_fill(padding.flatten()[:, None], self.config.num_experts)
        if not returns_routing:
            return self._mix(tokens, chosen, gates).view(x.shape)
        counts = count_choices(chosen, self.config.num_experts)
        dropped = counts.new_zeros(())
        if self.config.capacity_factor is not None:
            capacity = math.ceil(self.config.capacity_factor * chosen.numel() / self.config.num_experts)
            chosen, dropped = drop_over_capacity(chosen, counts, capacity)
        out = self._mix(tokens, chosen, gates).view(x.shape)
        if self.config.affinity == "sigmoid":
            affinities = affinities / (affinities.sum(-1, keepdim=True) + _EPS)
        z = logits.logsumexp(-1).square()
        if padding is not None:
            affinities = affinities.masked_fill(padding.flatten()[:, None], 0)
            z = z.masked_fill(padding.flatten(), 0)
        return out, Routing(counts, affinities.sum(0), z.sum(), dropped)

    def _mix(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs, each times its gate, and of the shared experts' outputs."""
        out: Tensor = self.experts(tokens, chosen, gates)
        return out if self.shared is None else out + self.shared(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return the router's logits (N, E), in float32 also under autocast: rounding would change choices."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return linear(tokens.to(dtype), self.router.weight.to(dtype))

    def _choose(self, affinities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their gates, (N, k) each, from the affinities (N, E)."""
        scores = affinities.detach() if self.expert_bias is None else affinities.detach() + self.expert_bias
        # topk breaks ties in any order.
        chosen = scores.sort(stable=True, dim=-1, descending=True).indices[:, : self.config.top_k].contiguous()
        gates = affinities.gather(-1, chosen)
        if self.config.normalized_gates:
            gates = gates / (gates.sum(-1, keepdim=True) + _EPS)
        return chosen, gates


def count_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is in ``chosen`` (N, k): (E,) float32."""
    experts = torch.arange(num_experts, device=chosen.device)
    return (chosen.flatten()[:, None] == experts).sum(0, dtype=torch.float32)


def drop_over_capacity(chosen: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Replace all but the first ``capacity`` choices of each expert by E, which stands for no expert, as in padding.

    The first tokens come first. ``counts`` (E,) are those of ``chosen`` (N, k). Return the choices, and the number of
    replaced ones, a float32 scalar.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    first = F.pad(counts.cumsum(0) - counts, (0, 1)).long()  # place of each expert's first choice in this order
    ranks = torch.arange(len(flat), device=flat.device) - first[flat[order]]
    is_dropped = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, ranks >= capacity)
    kept = flat.masked_fill(is_dropped, len(counts)).view(chosen.shape)
    return kept, (counts - capacity).clamp(min=0).sum()
