"""The layers that a Transformer is made of, each from torch primitives.

Sources: CS336 assignment 1 (section 3); Zhang & Sennrich 2019 (RMSNorm); Su et al. 2021 (RoPE); Shazeer 2020 (SwiGLU);
Ainslie et al. 2023 (grouped queries); Henry et al. 2020 (QK-norm).
Shapes in comments: B batch, T sequence, D d_model, H heads, K head dimension.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.fused import causal_attention, linear, rms_norm, swiglu

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values (B, heads, T, K) → (B, H, T, K)


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill ``weight`` in place from N(0, std²) cut at ±3 std."""
    nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)


class Linear(nn.Module):
    """``y = x Wᵀ`` without a bias; ``weight`` is (out_features, in_features), N(0, 2/(in+out)) cut at 3σ."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        truncated_normal_(self.weight, math.sqrt(2 / (in_features + out_features)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        return linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of ``weight`` (num_embeddings, embedding_dim) looked up by id; N(0, 1) cut at ±3."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        truncated_normal_(self.weight, 1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Integer ids (...) → (..., embedding_dim)."""
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight``, computed in float32 whatever the input (Zhang & Sennrich 2019)."""

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape and dtype."""
        if not torch.compiler.is_compiling():
            return rms_norm(x, self.weight, self.eps)
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.weight.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)``."""
    return x * torch.sigmoid(x)


class SwiGLU(nn.Module):
    """``w2(silu(w1 x) ⊙ w3 x)`` (Shazeer 2020)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """The gate and what it lets through: twice (..., d_ff)."""
        return self.w1(x), self.w3(x)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape."""
        gate, up = self.project(x)
        return self.w2(F.silu(gate) * up if torch.compiler.is_compiling() else swiglu(gate, up))


class FeedForward(nn.Module):
    """``w2(f(w1 x))``, with ``f`` silu or the square of relu (So et al. 2021)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Literal["silu", "relu2"],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = F.silu if activation == "silu" else _relu2
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape."""
        return self.w2(self.activation(self.w1(x)))


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


class RotaryEmbedding(nn.Module):
    """Turns the pairs (2i, 2i+1) of a head by ``position · theta^(-2i/d_k)``: Meta's interleaved RoPE."""

    cos: Tensor
    sin: Tensor

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, d_k, 2, device=device, dtype=torch.float32) / d_k)
        angles = torch.outer(torch.arange(max_seq_len, device=device, dtype=torch.float32), frequencies)
        # Derived from the config, so never part of a state dict.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """Turn ``x`` (..., T, d_k) by its positions (..., T), by default 0 … T-1; same shape and dtype."""
        if token_positions is None:
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        else:
            cos, sin = self.cos[token_positions], self.sin[token_positions]
        pairs = x.float().unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # it does not compile complex numbers
            even, odd = pairs.unbind(-1)
            turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        else:
            turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
        return turned.flatten(-2).to(x.dtype)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along ``dim``, stable: the maximum is taken off first."""
    exponentials = torch.exp(x - x.amax(dim, keepdim=True))
    return exponentials / exponentials.sum(dim, keepdim=True)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention written out: ``softmax(q kᵀ / sqrt(d_k)) v``. The model runs torch's fused one; tests hold them equal.

    ``q`` (..., T, d_k), ``k`` (..., S, d_k), ``v`` (..., S, d_v); ``mask`` bool (..., T, S), True where attention is
    allowed. Returns (..., T, d_v). Each row of the mask must allow at least one key.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores, dim=-1) @ v


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention over ``num_heads`` heads, with rotary positions when ``rope`` is given.

    ``num_kv_heads`` heads of keys and values are shared by the others in turn. With ``qk_norm`` queries and keys are
    normalized head by head, before they are turned.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryEmbedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.d_k = d_model // num_heads
        self.rope = rope
        kv_width = self.d_k * (num_kv_heads or num_heads)
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, kv_width, device, dtype)
        self.v_proj = Linear(d_model, kv_width, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)
        self.q_norm, self.k_norm = (
            RMSNorm(self.d_k, norm_eps, device, dtype) if qk_norm else nn.Identity() for _ in "qk"
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of all heads, each (..., heads · K)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor, token_positions: Tensor | None = None, attend: Attend = causal_attention) -> Tensor:
        """(B, T, D) → (B, T, D); ``token_positions`` (T,) or (B, T). ``attend`` may know earlier keys and values."""
        q, k, v = (part.unflatten(-1, (-1, self.d_k)).transpose(-3, -2) for part in self.project(x))  # (B, H, T, K)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if token_positions is not None and token_positions.dim() > 1:
                token_positions = token_positions.unsqueeze(-2)  # the same for every head
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        return self.output_proj(attend(q, k, v).transpose(-3, -2).flatten(-2))
