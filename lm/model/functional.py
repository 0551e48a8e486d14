"""Plain reference functions (CS336 assignment 1, section 3). Tests hold the fused forms in :mod:`lm.model.ops` equal
to them.

Shapes: N tokens, D d_model, F inner width of an expert, E experts, V vocabulary.
"""

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


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, softcap: float = 0.0
) -> Tensor:
    """Return ``softmax(q kᵀ / sqrt(d_k)) v``: (..., T, d_v).

    ``q`` (..., T, d_k), ``k`` (..., S, d_k), ``v`` (..., S, d_v). ``mask`` bool (..., T, S) is True where attention is
    allowed; each row must allow at least one key. A ``softcap`` above 0 limits the scores to ± it. The model runs
    :func:`lm.model.ops.causal_attention.causal_attention` instead.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores, dim=-1) @ v


def mix_experts(
    x_ND: Tensor, gates_NE: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor | None, activation: str
) -> Tensor:
    """Return the sum of all experts' outputs, each times its gate: (N, D).

    Gates are 0 for experts that do not compute a token. Expert e is ``w2[e] (f(w1[e] x) ⊙ w3[e] x)``; ``w3`` may be
    None. ``activation``: ``silu`` or ``relu2``. A loop over the experts, each for all tokens. The model runs
    :func:`lm.model.ops.experts.mix_experts` instead.
    """
    out_ND = torch.zeros_like(x_ND)
    for expert in range(len(w1_EFD)):
        inner_NF = x_ND @ w1_EFD[expert].T
        inner_NF = silu(inner_NF) if activation == "silu" else torch.relu(inner_NF).square()
        if w3_EFD is not None:
            inner_NF = inner_NF * (x_ND @ w3_EFD[expert].T)
        out_ND = out_ND + gates_NE[:, expert, None].to(x_ND.dtype) * (inner_NF @ w2_EDF[expert].T)
    return out_ND


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
