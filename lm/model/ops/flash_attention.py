"""FlashAttention-2 (Dao 2023) in plain torch operations: the readable form of the Triton kernels.

Attention is computed tile by tile: a block of queries against a block of keys. No tensor has T × T elements, so memory
grows with T. The forward pass saves the log-sum-exp of each query's scores; with it the backward pass recomputes the
attention weights of a tile without the other tiles of its row. Both passes are operators of torch, because
torch.compile would unroll their loops.
Shapes in comments: B batch · query heads, B' batch · key and value heads, G = B / B' queries that share a head,
T tokens, K head width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.common.errors import UserError

_BLOCK_QUERIES = 128
_BLOCK_KEYS = 128


class FlashAttentionTorch(torch.autograd.Function):
    """Attention ``softmax(q kᵀ / sqrt(K)) v``: ``FlashAttentionTorch.apply(q, k, v, is_causal)`` → (B, T, K).

    ``q`` (B, T, K); ``k`` and ``v`` (B', T, K). B / B' consecutive rows of ``q`` share a row of ``k`` and ``v``. Tiles
    are computed in float32, or in float64 for float64 inputs. Saves ``q``, ``k``, ``v``, the output and the log-sum-exp
    (B, T). Raises UserError if the shapes or dtypes do not fit together.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Compute attention, and save what the backward pass needs."""
        check_inputs(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            out, log_sum_exp = tiled_attention(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of the inputs."""
        with torch.autocast(grad.device.type, enabled=False):
            q, k, v, out, log_sum_exp = ctx.saved_tensors
            return *_backward(q, k, v, out, log_sum_exp, grad, ctx.is_causal), None


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UserError if FlashAttention cannot be computed for ``q``, ``k`` and ``v``."""
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:]:
        raise UserError(
            f"FlashAttention needs q (B, T, K), and k and v (B', T, K) with the same T and K; got {shapes}."
        )
    if not len(k) or len(q) % len(k):
        raise UserError(f"The first dimension of q must be a multiple of that of k and v; got {shapes}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise UserError(f"q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")


@torch.library.custom_op("textmill::tiled_attention", mutates_args=())
def tiled_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, K) and the log-sum-exp of each query's scores (B, T). Algorithm 1 of the paper."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]  # (B', G, T, K), (B', 1, T, K)
    out = queries.new_empty(queries.shape)
    log_sum_exp = queries.new_empty(queries.shape[:-1], dtype=dtype)
    for rows in _blocks(q.shape[1], _BLOCK_QUERIES):
        query = queries[..., rows, :].to(dtype)
        total = torch.zeros_like(query)  # Σ exp(score - row_max) · value over the keys so far
        row_sum = query.new_zeros(*query.shape[:-1], 1)  # Σ exp(score - row_max)
        row_max = torch.full_like(row_sum, float("-inf"))
        for columns in _blocks(rows.stop if is_causal else q.shape[1], _BLOCK_KEYS):
            key, value = keys[..., columns, :].to(dtype), values[..., columns, :].to(dtype)
            scores = _tile_scores(query, key, rows, columns, is_causal)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            weights, correction = torch.exp(scores - new_max), torch.exp(row_max - new_max)
            total = total * correction + weights @ value
            row_sum = row_sum * correction + weights.sum(-1, keepdim=True)
            row_max = new_max
        out[..., rows, :] = (total / row_sum).to(out.dtype)
        log_sum_exp[..., rows] = (row_max + row_sum.log()).squeeze(-1)
    return out.flatten(0, 1), log_sum_exp.flatten(0, 1)


@torch.library.custom_op("textmill::tiled_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``. Algorithm 2 of the paper."""
    dtype, scale, groups = log_sum_exp.dtype, q.shape[-1] ** -0.5, (len(k), -1)
    queries, grads, row_log_sum_exp = (x.unflatten(0, groups) for x in (q, grad, log_sum_exp[..., None]))
    # The component of the gradient of a row's weights along the weights, which softmax removes.
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True).unflatten(0, groups)
    grad_q = queries.new_zeros(queries.shape, dtype=dtype)
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    for columns in _blocks(q.shape[1], _BLOCK_KEYS):
        key, value = k[:, None, columns].to(dtype), v[:, None, columns].to(dtype)
        grad_key, grad_value = torch.zeros_like(key[:, 0]), torch.zeros_like(value[:, 0])
        for rows in _blocks(q.shape[1], _BLOCK_QUERIES):
            if is_causal and rows.stop <= columns.start:
                continue
            query, grad_out = queries[..., rows, :].to(dtype), grads[..., rows, :].to(dtype)
            scores = _tile_scores(query, key, rows, columns, is_causal)
            weights = torch.exp(scores - row_log_sum_exp[..., rows, :])
            grad_scores = weights * (grad_out @ value.mT - delta[..., rows, :])
            grad_q[..., rows, :] += grad_scores @ key * scale
            grad_key += (grad_scores.mT @ query).sum(1) * scale
            grad_value += (weights.mT @ grad_out).sum(1)
        grad_k[:, columns], grad_v[:, columns] = grad_key.to(k.dtype), grad_value.to(v.dtype)
    return grad_q.flatten(0, 1).to(q.dtype), grad_k, grad_v


@tiled_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _tile_scores(query: Tensor, key: Tensor, rows: slice, columns: slice, is_causal: bool) -> Tensor:
    """Return the scores of a tile; with ``is_causal`` those of later keys are -inf."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal and columns.stop - 1 > rows.start:
        row, column = (torch.arange(part.start, part.stop, device=query.device) for part in (rows, columns))
        scores = scores.masked_fill(column > row[:, None], float("-inf"))
    return scores
