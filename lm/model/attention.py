"""Causal multi-head self-attention with grouped queries (Ainslie et al. 2023) and QK-norm (Henry et al. 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.types import Device

from lm.model.linear import Linear
from lm.model.norm import RMSNorm
from lm.model.ops.causal_attention import causal_attention
from lm.model.rope import RotaryEmbedding

# Queries (B, H, T, K), keys and values (B, H', T, K) → (B, H, T, K)
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention over ``num_heads`` heads, with rotary position embeddings if ``rope`` is given.

    ``num_heads / num_kv_heads`` consecutive query heads share a head of keys and values. ``qk_norm`` applies RMSNorm to
    the queries and keys of each head before rotation. ``qkv_bias`` adds a bias to queries, keys and values. A head is
    ``head_dim`` wide, by default ``d_model / num_heads``.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryEmbedding | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.d_k = head_dim or d_model // num_heads
        self.rope = rope
        q_width, kv_width = self.d_k * num_heads, self.d_k * (num_kv_heads or num_heads)
        self.q_proj = Linear(d_model, q_width, device, dtype, role="query_key", has_bias=qkv_bias)
        self.k_proj = Linear(d_model, kv_width, device, dtype, role="query_key", has_bias=qkv_bias)
        self.v_proj = Linear(d_model, kv_width, device, dtype, role="value_output", has_bias=qkv_bias)
        self.output_proj = Linear(q_width, d_model, device, dtype, role="value_output")
        self.q_norm, self.k_norm = (
            RMSNorm(self.d_k, norm_eps, device, dtype) if qk_norm else nn.Identity() for _ in "qk"
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the queries, keys and values of all heads, each (B, T, heads · K)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(
        self, x: Tensor, token_positions: Tensor | None = None, attention_function: AttentionFunction = causal_attention
    ) -> Tensor:
        """(B, T, D) → (B, T, D); ``token_positions`` (T,) or (B, T).

        A KV cache passes an ``attention_function`` that also attends to earlier keys and values.
        """
        q, k, v = (part.unflatten(-1, (-1, self.d_k)).transpose(-3, -2) for part in self.project(x))  # (B, H, T, K)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if token_positions is not None and token_positions.dim() > 1:
                token_positions = token_positions.unsqueeze(-2)  # broadcast over heads
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        return self.output_proj(attention_function(q, k, v).transpose(-3, -2).flatten(-2))
