"""The form of causal attention that a model computes with: a choice of this machine, not of the model.

Each form maps queries (B, H, T, K) and keys and values (B, H', T, K) to (B, H, T, K); H / H' consecutive query heads
share a key and value head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.common.execution import AttentionForm
from lm.model.functional import scaled_dot_product_attention
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.flash_attention import FlashAttentionTorch
from lm.model.ops.flash_attention_triton import FlashAttentionTriton, load_kernels


def choose_attention(form: AttentionForm, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function of an attention form for tensors on ``device``.

    Raises UserError if ``form`` is ``flash`` and Triton is not installed, on a GPU.
    """
    if form == "sdpa":
        return sdpa_attention
    if form == "reference":
        return reference_attention
    if form == "flash":
        if device.type == "cuda":
            load_kernels()  # fails now rather than in the first step
        return flash_attention
    # On GPUs this is torch's own, cuDNN's on an H200. Ours is faster than torch's flash kernel there, but was not
    # measured beside cuDNN's; see benchmarks/GPU.md.
    return causal_attention


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch's ``scaled_dot_product_attention``."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[-3] > k.shape[-3])


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by FlashAttention-2: in Triton on GPUs, in plain torch operations elsewhere."""
    heads = (x.flatten(0, 1) for x in (q, k, v))
    function = FlashAttentionTriton if q.device.type == "cuda" else FlashAttentionTorch
    out: Tensor = function.apply(*heads, True)
    return out.view(q.shape)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by the plain reference. Memory grows with T²."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scaled_dot_product_attention(q, k, v, mask)
