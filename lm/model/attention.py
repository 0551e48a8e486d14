"""Causal multi-head self-attention: grouped queries (Ainslie et al. 2023), QK-norm (Henry et al. 2020), sliding windows
(Beltagy et al. 2020) and value residuals (Zhou et al. 2024).

Shapes: B batch, T tokens, D d_model, H query heads, G key and value heads, K head_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.types import Device

from lm.model.config import ModelConfig
from lm.model.linear import Linear, Role
from lm.model.norm import make_norm
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.windowed_attention import PLAIN, AttentionRule
from lm.model.rope import RotaryEmbedding

# Queries (B, H, T, K), keys and values (B, G, T, K) → (B, H, T, K). A fourth argument, an AttentionRule, comes if the
# layer has a window or a soft-cap.
AttentionFunction = Callable[..., Tensor]


class ValueSum(nn.Module):
    """A learned sum of a layer's values and those of the first layer. ``weight`` (2,), their factors, starts at 0.5."""

    role: Role = "norm"

    def __init__(self, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.5, device=device, dtype=dtype))

    def forward(self, values: Tensor, first_values: Tensor) -> Tensor:
        """Two tensors of one shape → that shape and the dtype of ``values``."""
        return (values * self.weight[0] + first_values * self.weight[1]).to(values.dtype)


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention over ``config.num_heads`` heads, with rotary position embeddings if ``rope`` is given.

    H / G consecutive query heads share a head of keys and values. ``config.qk_norm`` applies RMSNorm to the queries and
    keys of each head before rotation, or to those of all heads together. ``config.qkv_bias`` adds a bias to queries,
    keys and values. A token attends to the last ``window`` tokens, itself included; None: to all before it.
    ``is_first``: with ``config.value_residual``, the values are those that the other layers add to their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        rope: RotaryEmbedding | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        window: int | None = None,
        is_first: bool = True,
    ) -> None:
        super().__init__()
        self.gives_values = config.value_residual and is_first
        self.value_sum = None
        if config.value_residual and not is_first:
            self.value_sum = ValueSum(device, dtype)
        self.head_dim, self.rope = config.resolved_head_dim, rope
        self.rule, self.has_wide_norm = AttentionRule(window, config.attention_softcap), not config.qk_norm_per_head
        self.is_plain = self.rule == PLAIN
        # Attention functions divide the products by the square root of the width.
        factor = config.factors.attention
        self.query_factor = 1.0 if factor is None else factor * self.head_dim**0.5
        q_dim, kv_dim = self.head_dim * config.num_heads, self.head_dim * config.kv_heads
        bias = config.qkv_bias
        self.q_proj = Linear(config.d_model, q_dim, device, dtype, role="query_key", has_bias=bias)
        self.k_proj = Linear(config.d_model, kv_dim, device, dtype, role="query_key", has_bias=bias)
        self.v_proj = Linear(config.d_model, kv_dim, device, dtype, role="value_output", has_bias=bias)
        self.output_proj = Linear(q_dim, config.d_model, device, dtype, role="value_output")
        widths = (q_dim, kv_dim) if self.has_wide_norm else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (
            make_norm(config, device, dtype, width) if config.qk_norm else nn.Identity() for width in widths
        )

    def project(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return the queries (B, T, H · K), keys and values (B, T, G · K) of all heads."""
        return self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)

    def forward(
        self,
        x_BTD: Tensor,
        token_positions: Tensor | None = None,
        attention_function: AttentionFunction = causal_attention,
        first_values: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, T, D) → (B, T, D); ``token_positions`` (T,) or (B, T).

        A KV cache passes an ``attention_function`` that also attends to earlier keys and values. With value residuals
        the first layer also returns its values (B, T, G · K), the ``first_values`` of the others.
        """
        q, k, v = self.project(x_BTD)
        if self.value_sum is not None and first_values is not None:
            v = self.value_sum(v, first_values)
        if self.has_wide_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHTK, k_BGTK, v_BGTK = (heads.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for heads in (q, k, v))
        if not self.has_wide_norm:
            q_BHTK, k_BGTK = self.q_norm(q_BHTK), self.k_norm(k_BGTK)
        if self.rope is not None:
            if token_positions is not None and token_positions.dim() > 1:
                token_positions = token_positions.unsqueeze(-2)  # broadcast over heads
            q_BHTK, k_BGTK = self.rope(q_BHTK, token_positions), self.rope(k_BGTK, token_positions)
        if self.query_factor != 1:
            q_BHTK = q_BHTK * self.query_factor
        rule = () if self.is_plain else (self.rule,)
        out: Tensor = self.output_proj(attention_function(q_BHTK, k_BGTK, v_BGTK, *rule).transpose(-3, -2).flatten(-2))
        return (out, v) if self.gives_values else out
