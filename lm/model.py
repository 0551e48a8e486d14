"""A Llama-style decoder-only Transformer: RMSNorm, rotary positions, SwiGLU, pre-norm, no biases; and its variants.

Sources: CS336 assignment 1 (sections 3 and 7.3); Touvron et al. 2023 (Llama 2); Su et al. 2021 (RoPE); Shazeer 2020
(SwiGLU); Ainslie et al. 2023 (grouped queries); Henry et al. 2020 (QK-norm); Gemma Team 2024 (soft-cap).
Shapes in comments: B batch, T sequence, D d_model, H heads, K head dimension, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.bounds import FORM, bounded, check_bounds
from lm.errors import UserError
from lm.fused import causal_attention, linear, linear_cross_entropy, rms_norm, swiglu


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the Transformer. The defaults are the TinyStories model of CS336 assignment 1."""

    __pydantic_config__ = FORM

    vocab_size: int | None = bounded(None, ge=1)
    """Number of token ids, the rows of embedding and head. Default: as many as the tokenizer has."""
    context_length: int = bounded(256, ge=1)
    """Longest sequence the model sees, in tokens."""
    d_model: int = bounded(512, ge=2)
    """Width of the residual stream. A multiple of num_heads."""
    num_layers: int = bounded(4, ge=1)
    """Number of Transformer blocks."""
    num_heads: int = bounded(16, ge=1)
    """Attention heads a block; each is d_model / num_heads wide, an even number (RoPE turns pairs)."""
    num_kv_heads: int | None = bounded(None, ge=1)
    """Heads of keys and values, each shared by as many query heads: a divisor of num_heads. Default: num_heads."""
    d_ff: int = bounded(1344, ge=1)
    """Inner width of the feed-forward network; about 8/3 of d_model, a multiple of 64 for speed."""
    feed_forward: Literal["swiglu", "silu", "relu2"] = "swiglu"
    """swiglu has three matrices; silu and relu2 (the square of relu) have two, and want a d_ff of 4 d_model."""
    norm: Literal["pre", "post", "none"] = "pre"
    """RMSNorm before each sublayer and at the end; or after each sum with the residual stream; or nowhere."""
    qk_norm: bool = False
    """Whether queries and keys are normalized head by head, which keeps their products from growing."""
    positions: Literal["rope", "none"] = "rope"
    """rope turns queries and keys by their place; without, only the causal mask tells the order."""
    rope_theta: float = bounded(10000.0, gt=0)
    """Base of the rotary frequencies; larger turns more slowly, for longer contexts."""
    norm_eps: float = bounded(1e-5, ge=0)
    """Added to the mean square in RMSNorm so that a zero vector does not divide by zero."""
    tied_embeddings: bool = False
    """Whether the head's matrix is the embedding's, which then starts smaller."""
    logit_softcap: float = bounded(0.0, ge=0, lt=math.inf)
    """Logits are squeezed into ± this by ``cap · tanh(logits / cap)``; 0 leaves them."""

    def __post_init__(self) -> None:
        check_bounds(self, "model")
        if self.d_model % self.num_heads or (self.d_model // self.num_heads) % 2:
            raise UserError(
                f"model.d_model {self.d_model} / model.num_heads {self.num_heads} must be an even whole number "
                "(the width of a head, whose pairs RoPE turns)."
            )
        if self.num_heads % self.kv_heads:
            raise UserError(f"model.num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}.")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads


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

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape."""
        gate, up = self.w1(x), self.w3(x)
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
        self.shares = num_heads // (num_kv_heads or num_heads)
        self.rope = rope
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, d_model // self.shares, device, dtype)
        self.v_proj = Linear(d_model, d_model // self.shares, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)
        self.q_norm, self.k_norm = (
            RMSNorm(self.d_k, norm_eps, device, dtype) if qk_norm else nn.Identity() for _ in "qk"
        )

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """(B, T, D) → (B, T, D); ``token_positions`` (T,) or (B, T)."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.d_k)).transpose(-3, -2)  # (B, H, T, K)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if token_positions is not None and token_positions.dim() > 1:
                token_positions = token_positions.unsqueeze(-2)  # the same for every head
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        heads = causal_attention(q, k, v)
        return self.output_proj(heads.transpose(-3, -2).flatten(-2))


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream.

    ``norm`` is ``pre``: ``x + f(ln x)``; ``post``: ``ln(x + f(x))``; or ``none``: ``x + f(x)``.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryEmbedding | None = None,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        norm: Literal["pre", "post", "none"] = "pre",
        feed_forward: Literal["swiglu", "silu", "relu2"] = "swiglu",
    ) -> None:
        super().__init__()
        self.is_post = norm == "post"
        self.ln1, self.ln2 = (
            nn.Identity() if norm == "none" else RMSNorm(d_model, norm_eps, device, dtype) for _ in range(2)
        )
        self.attn = MultiHeadSelfAttention(
            d_model, num_heads, rope, device, dtype, num_kv_heads=num_kv_heads, qk_norm=qk_norm, norm_eps=norm_eps
        )
        self.ffn = (
            SwiGLU(d_model, d_ff, device, dtype)
            if feed_forward == "swiglu"
            else FeedForward(d_model, d_ff, feed_forward, device, dtype)
        )

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        if self.is_post:
            x = self.ln1(x + self.attn(x, token_positions))
            return self.ln2(x + self.ffn(x))
        x = x + self.attn(self.ln1(x), token_positions)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Token ids in, next-token logits out. While ``recomputes`` is set, the backward pass runs each block a second time
    instead of keeping its activations: about a third more work for a fraction of the memory."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set; give the tokenizer's number of ids.")
        self.config = config
        self.recomputes = False
        d_k = config.d_model // config.num_heads
        rope = RotaryEmbedding(config.rope_theta, d_k, config.context_length, device)
        self.rope = rope if config.positions == "rope" else None
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, device, dtype)
        self.layers = nn.ModuleList(
            TransformerBlock(
                config.d_model,
                config.num_heads,
                config.d_ff,
                self.rope,
                config.norm_eps,
                device,
                dtype,
                num_kv_heads=config.num_kv_heads,
                qk_norm=config.qk_norm,
                norm=config.norm,
                feed_forward=config.feed_forward,
            )
            for _ in range(config.num_layers)
        )
        is_normed = config.norm == "pre"  # after the last block of the others there is one already, or none at all
        self.ln_final = RMSNorm(config.d_model, config.norm_eps, device, dtype) if is_normed else nn.Identity()
        if config.tied_embeddings:
            truncated_normal_(self.token_embeddings.weight, config.d_model**-0.5)  # logits of order 1, as a head gives
        else:
            self.lm_head = Linear(config.d_model, config.vocab_size, device, dtype)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix (V, D), which may be the embedding's."""
        return self.token_embeddings.weight if self.config.tied_embeddings else self.lm_head.weight

    def forward(self, token_ids: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """Integer ids (B, T), T ≤ context_length → logits (B, T, V).

        Raises UserError when the sequence is longer than the context.
        """
        logits = linear(self.hidden(token_ids, token_positions), self.head_weight)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def hidden(self, token_ids: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """What the head is given: (B, T) → (B, T, D). Raises as :meth:`forward` does."""
        if token_ids.shape[-1] > self.config.context_length:
            raise UserError(
                f"A sequence of {token_ids.shape[-1]} tokens does not fit the model's context of "
                f"{self.config.context_length}."
            )
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(layer, x, token_positions, use_reentrant=False)
            else:
                x = layer(x, token_positions)
        return self.ln_final(x)

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the logits and ``targets`` (B, T), in nats, without all the logits at a time."""
        hidden = self.hidden(token_ids).flatten(0, -2)
        return linear_cross_entropy(hidden, self.head_weight, targets.flatten(), self.config.logit_softcap)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean of ``-log softmax(logits)[target]`` over targets that are not ``ignore_index``; a scalar in nats.

    ``logits`` (..., V), ``targets`` int (...). Written out and stable (the maximum is taken off first); training runs
    torch's fused one and tests hold them equal. All targets ignored gives nan, as torch does.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    kept = targets != ignore_index
    picked = shifted.gather(-1, targets.masked_fill(~kept, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.log(torch.exp(shifted).sum(-1)) - picked
    return losses.masked_fill(~kept, 0.0).sum() / kept.sum()
