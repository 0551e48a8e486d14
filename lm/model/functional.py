"""Plain reference functions (CS336 assignment 1, section 3). Tests hold the fused forms in :mod:`lm.model.ops` equal
to them."""

import math

import torch
from torch import Tensor

IGNORE_INDEX = -100  # target of a position that does not count in the loss, as in torch


def silu(x: Tensor) -> Tensor:
    """Return ``x · sigmoid(x)``."""
    return x * torch.sigmoid(x)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the softmax along ``dim``, in the dtype of ``x``, computed in at least float32. Subtracts the maximum
    first, so that ``exp`` does not overflow."""
    exponentials = torch.exp(_at_least_float32(x) - x.amax(dim, keepdim=True))
    return (exponentials / exponentials.sum(dim, keepdim=True)).to(x.dtype)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``softmax(q kᵀ / sqrt(d_k)) v``: (..., T, d_v).

    ``q`` (..., T, d_k), ``k`` (..., S, d_k), ``v`` (..., S, d_v). ``mask`` bool (..., T, S) is True where attention is
    allowed; each row must allow at least one key. The model runs
    :func:`lm.model.ops.causal_attention.causal_attention` instead.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores, dim=-1) @ v


def mix_experts(x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None, activation: str) -> Tensor:
    """Return the sum of all experts' outputs, each times its gate: (N, D).

    ``x`` (N, D), ``gates`` (N, E), 0 for experts that do not compute a token. Expert e is
    ``w2[e] (f(w1[e] x) ⊙ w3[e] x)``: ``w1`` and ``w3`` (E, d, D), ``w2`` (E, D, d); ``w3`` may be None. ``activation``:
    ``silu`` or ``relu2``. A loop over the experts, each for all tokens. The model runs
    :func:`lm.model.ops.experts.mix_experts` instead.
    """
    out = torch.zeros_like(x)
    for expert in range(len(w1)):
        inner = x @ w1[expert].T
        inner = silu(inner) if activation == "silu" else torch.relu(inner).square()
        if w3 is not None:
            inner = inner * (x @ w3[expert].T)
        out = out + gates[:, expert, None].to(x.dtype) * (inner @ w2[expert].T)
    return out


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return the mean of ``-log softmax(logits)[target]`` over the targets that are not ``ignore_index``; a scalar in
    nats, in the dtype of ``logits``, computed in at least float32.

    ``logits`` (..., V), ``targets`` int (...). Without any counted target the result is nan, as in torch. Training runs
    :func:`lm.model.ops.cross_entropy.linear_cross_entropy` instead, which returns 0 in that case.
    """
    shifted = _at_least_float32(logits)
    shifted = shifted - shifted.amax(-1, keepdim=True)
    is_counted = targets != ignore_index
    target_logits = shifted.gather(-1, targets.masked_fill(~is_counted, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.log(torch.exp(shifted).sum(-1)) - target_logits
    return (losses.masked_fill(~is_counted, 0.0).sum() / is_counted.sum()).to(logits.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
