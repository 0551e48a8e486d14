"""Causal attention, and the backends that compute it: a choice of this machine, not of the model.

A backend maps queries (B, H, T, K) and keys and values (B, G, T, K) to (B, H, T, K); H / G consecutive query heads
share a key and value head. Its fourth argument is an :class:`lm.model.ops.windowed_attention.AttentionRule`; with any
but the plain one, all but the reference run that module. The plain reference is
:func:`lm.model.functional.scaled_dot_product_attention`.
Shapes: B batch, H query heads, G key and value heads, T tokens, K head_dim, N = B · H.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.common.execution import AttentionForm
from lm.model.functional import scaled_dot_product_attention
from lm.model.ops.flash_attention import flash_attention, load_kernels
from lm.model.ops.windowed_attention import PLAIN, AttentionRule, masked_attention, windowed_attention

_HAS_CPU_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
_BLOCK_QUERIES = 256  # a block also computes scores above the diagonal; few queries waste few of them
_BLOCK_SCORES = 1 << 19  # attention scores of a block: in bfloat16 they and their gradients fit a CPU's cache


def choose_attention(form: AttentionForm, device: torch.device) -> Callable[..., Tensor]:
    """Return the function of an attention backend for tensors on ``device``.

    Raises UserError if ``form`` is ``flash`` and Triton is not installed, on a GPU.
    """
    if form == "sdpa":
        return sdpa_attention
    if form == "reference":
        return reference_attention
    if form == "flash":
        if device.type == "cuda":
            load_kernels()  # fails now rather than in the first step
        return _flash_attention
    # On GPUs this is torch's own, cuDNN's on an H200. Ours is faster than torch's flash kernel there, but was not
    # measured beside cuDNN's; see benchmarks/GPU.md.
    return causal_attention


def causal_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """Return ``softmax(q kᵀ / sqrt(K)) v`` with a causal mask: (B, H, T, K).

    Short bfloat16 sequences on a CPU run as blocks of bfloat16 matmuls, which torch's fused attention does not use
    there. Everything else runs on torch's ``scaled_dot_product_attention``.
    """
    is_cpu_bfloat16 = q_BHTK.device.type == "cpu" and q_BHTK.dtype == torch.bfloat16 and _HAS_CPU_BFLOAT16
    is_plain = rule.is_plain(q_BHTK.shape[-2])
    if not is_plain or not is_cpu_bfloat16 or q_BHTK.shape[-2] > 1024:  # at 2048 torch's attention is as fast
        return sdpa_attention(q_BHTK, k_BGTK, v_BGTK, rule)
    k_BHTK, v_BHTK = _repeat_kv_heads(q_BHTK, k_BGTK, v_BGTK)
    out_NTK: Tensor = blocked_causal_attention(*(x.reshape(-1, *x.shape[-2:]) for x in (q_BHTK, k_BHTK, v_BHTK)))
    return out_NTK.view(q_BHTK.shape)


def sdpa_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """Return causal attention by torch's ``scaled_dot_product_attention``."""
    if not rule.is_plain(q_BHTK.shape[-2]):
        return windowed_attention(q_BHTK, k_BGTK, v_BGTK, rule)
    has_groups = q_BHTK.shape[-3] > k_BGTK.shape[-3]
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=has_groups)


def _flash_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """Return causal attention by FlashAttention, which has no windows and no soft-cap."""
    if not rule.is_plain(q_BHTK.shape[-2]):
        return windowed_attention(q_BHTK, k_BGTK, v_BGTK, rule)
    return flash_attention(q_BHTK, k_BGTK, v_BGTK)


def reference_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """Return causal attention by the plain reference. Memory grows with T²."""
    positions_T = torch.arange(q_BHTK.shape[-2], device=q_BHTK.device)
    mask_TT = rule.allows(positions_T[:, None], positions_T)
    k_BHTK, v_BHTK = _repeat_kv_heads(q_BHTK, k_BGTK, v_BGTK)
    return scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, mask_TT, rule.softcap)


def make_segment_attention(segment_ids_BT: Tensor) -> Callable[..., Tensor]:
    """Return causal attention within segments, for rows that hold several examples; int ``segment_ids``.

    A token attends to itself and to the tokens before it with the same segment id. Use it in each layer of a model.
    """
    length = segment_ids_BT.shape[-1]
    is_same = segment_ids_BT[:, None, :, None] == segment_ids_BT[:, None, None, :]
    mask_B1TT = is_same & is_same.new_ones(length, length).tril()
    positions_T = torch.arange(length, device=segment_ids_BT.device)

    def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
        is_allowed = mask_B1TT if rule.window is None else mask_B1TT & rule.allows(positions_T[:, None], positions_T)
        return masked_attention(q_BHTK, k_BGTK, v_BGTK, is_allowed, rule.softcap)

    return attend


def _repeat_kv_heads(q_BHTK: Tensor, *tensors_BGTK: Tensor) -> list[Tensor]:
    """Return the tensors with one head for each query head."""
    group_size = q_BHTK.shape[-3] // tensors_BGTK[0].shape[-3]
    return [x.repeat_interleave(group_size, -3) if group_size > 1 else x for x in tensors_BGTK]


@torch.library.custom_op("textmill::blocked_causal_attention", mutates_args=())
def blocked_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention for ``q``, ``k`` and ``v``, each (N, T, K), computed block by block."""
    out_NTK = torch.empty_like(v)
    for heads, queries, keys in _blocks(q):
        weights = _attention_weights(q[heads, queries], k[heads, keys], queries.start)
        torch.bmm(weights, v[heads, keys], out=out_NTK[heads, queries])
    return out_NTK


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


def _blocks(q_NTK: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of heads, of queries and of the keys that these queries see; the last queries first.

    A block has at most ``_BLOCK_SCORES`` scores, or one head.
    """
    head_count, length, _ = q_NTK.shape
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


blocked_causal_attention.register_fake(lambda q, k, v: torch.empty_like(v))
_backward.register_fake(lambda q, k, v, grad: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))
blocked_causal_attention.register_autograd(
    lambda ctx, grad: _backward(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
