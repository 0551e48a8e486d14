"""Causal attention.

Short bfloat16 sequences on a CPU run as blocks of bfloat16 matrix products, which torch's fused attention does not use
there. Everything else runs on torch's ``scaled_dot_product_attention``. The plain reference is
:func:`lm.model.functional.scaled_dot_product_attention`.
Shapes in comments: B batch, H query heads, H' key and value heads, T tokens, K head width, N = B · H.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_HAS_CPU_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
_MAX_TOKENS = 1024  # at twice the length torch's attention is as fast
_BLOCK_QUERIES = 256  # a block also computes scores above the diagonal; few queries waste few of them
_BLOCK_SCORES = 1 << 19  # attention scores of a block: in bfloat16 they and their gradients fit a CPU's cache


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``softmax(q kᵀ / sqrt(K)) v`` with a causal mask: (B, H, T, K).

    ``q`` (B, H, T, K); ``k`` and ``v`` (B, H', T, K). H / H' consecutive query heads share a key and value head.
    """
    group_size = q.shape[-3] // k.shape[-3]
    is_cpu_bfloat16 = q.device.type == "cpu" and q.dtype == torch.bfloat16 and _HAS_CPU_BFLOAT16
    if not is_cpu_bfloat16 or q.shape[-2] > _MAX_TOKENS:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group_size > 1)
    if group_size > 1:
        k, v = (x.repeat_interleave(group_size, -3) for x in (k, v))
    out: Tensor = blocked_causal_attention(*(x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)))
    return out.view(q.shape)


@torch.library.custom_op("textmill::blocked_causal_attention", mutates_args=())
def blocked_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention for ``q``, ``k`` and ``v``, each (N, T, K), computed block by block."""
    out = torch.empty_like(v)
    for heads, queries, keys in _blocks(q):
        weights = _attention_weights(q[heads, queries], k[heads, keys], queries.start)
        torch.bmm(weights, v[heads, keys], out=out[heads, queries])
    return out


@torch.library.custom_op("textmill::blocked_causal_attention_backward", mutates_args=())
def _backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``. Recomputes the attention weights."""
    scale, grad = q.shape[-1] ** -0.5, grad.contiguous()
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for heads, queries, keys in _blocks(q):
        weights = _attention_weights(q[heads, queries], k[heads, keys], queries.start)
        grad_weights = torch.bmm(grad[heads, queries], v[heads, keys].mT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, q.dtype).mul_(scale)
        torch.bmm(grad_scores, k[heads, keys], out=grad_q[heads, queries])
        block_grad_k = torch.bmm(grad_scores.mT, q[heads, queries])
        block_grad_v = torch.bmm(weights.mT, grad[heads, queries])
        if keys.stop == q.shape[1]:  # the first block of these heads covers all keys
            grad_k[heads], grad_v[heads] = block_grad_k, block_grad_v
        else:
            grad_k[heads, keys] += block_grad_k
            grad_v[heads, keys] += block_grad_v
    return grad_q, grad_k, grad_v


def _blocks(q: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of heads, of queries and of the keys that these queries see; the last queries first.

    A block has at most ``_BLOCK_SCORES`` scores, or one head.
    """
    head_count, length, _ = q.shape
    query_count = min(length, _BLOCK_QUERIES)
    block_heads = max(1, _BLOCK_SCORES // (query_count * length))
    for head in range(0, head_count, block_heads):
        for end in range(length, 0, -query_count):
            start = max(0, end - query_count)
            yield slice(head, head + block_heads), slice(start, end), slice(0, end)


def _attention_weights(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Return the attention weights of queries from position ``start`` on; the last key is at the last query."""
    scores = torch.bmm(q, k.mT).mul_(q.shape[-1] ** -0.5)
    mask = scores.new_full((q.shape[1], q.shape[1]), float("-inf")).triu_(1)
    scores[..., start:] += mask
    return scores.softmax(-1)


@blocked_causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(v)


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


blocked_causal_attention.register_autograd(
    lambda ctx, grad: _backward(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
