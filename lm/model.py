"""A Llama-style decoder-only Transformer: RMSNorm, rotary positions, SwiGLU, pre-norm, no biases; and its variants.

Sources: CS336 assignment 1 (sections 3 and 7.3); Touvron et al. 2023 (Llama 2); Gemma Team 2024 (soft-cap); Zhang
et al. 2019 (zero at the start); and those of :mod:`lm.layers`, whose names can be imported from here too.
Shapes in comments: B batch, T sequence, D d_model, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.bounds import FORM, bounded, check_bounds
from lm.errors import UserError
from lm.fused import causal_attention, linear, linear_cross_entropy
from lm.layers import (
    Attend,
    Embedding,
    FeedForward,
    Linear,
    MultiHeadSelfAttention,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    scaled_dot_product_attention,
    silu,
    softmax,
    truncated_normal_,
)

__all__ = [
    "Embedding",
    "Linear",
    "ModelConfig",
    "MultiHeadSelfAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "TransformerBlock",
    "TransformerLM",
    "cross_entropy",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the Transformer. The defaults are the TinyStories model of CS336 assignment 1."""

    __pydantic_config__ = FORM

    vocab_size: int | None = bounded(None, ge=1)
    """Number of token ids, the rows of embedding and head. Default: as many as the tokenizer has."""
    context_length: int = bounded(256, ge=1, le=1 << 24)
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
    zero_init_outputs: bool = False
    """Whether the last matrix of each sublayer starts at zero, so that every block begins as the identity."""
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

    def forward(self, x: Tensor, token_positions: Tensor | None = None, attend: Attend = causal_attention) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        if self.is_post:
            x = self.ln1(x + self.attn(x, token_positions, attend))
            return self.ln2(x + self.ffn(x))
        x = x + self.attn(self.ln1(x), token_positions, attend)
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
        self.lm_head = None if config.tied_embeddings else Linear(config.d_model, config.vocab_size, device, dtype)
        if config.zero_init_outputs:
            for name, weight in self.layers.named_parameters():
                if name.endswith((".output_proj.weight", ".w2.weight")):
                    nn.init.zeros_(weight)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix (V, D), which may be the embedding's."""
        return self.token_embeddings.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, token_ids: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """Integer ids (B, T), T ≤ context_length → logits (B, T, V).

        Raises UserError when the sequence is longer than the context.
        """
        return self.logits(self.hidden(token_ids, token_positions))

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head makes of :meth:`hidden`: (..., D) → (..., V)."""
        logits = linear(hidden, self.token_embeddings.weight) if self.lm_head is None else self.lm_head(hidden)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def hidden(
        self, token_ids: Tensor, token_positions: Tensor | None = None, attend: Sequence[Attend] | None = None
    ) -> Tensor:
        """What the head is given: (B, T) → (B, T, D). ``attend`` is each layer's attention, where it is not among
        ``token_ids`` alone. Raises as :meth:`forward` does."""
        if token_ids.shape[-1] > self.config.context_length:
            raise UserError(
                f"A sequence of {token_ids.shape[-1]} tokens does not fit the model's context of "
                f"{self.config.context_length}."
            )
        x = self.token_embeddings(token_ids)
        for number, layer in enumerate(self.layers):
            if attend is not None:
                x = layer(x, token_positions, attend[number])
            elif self.recomputes and torch.is_grad_enabled():
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
