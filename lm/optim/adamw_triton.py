"""AdamW's update in one Triton kernel for GPUs, which reads and writes each number once.

Triton is an extra, so :mod:`lm.optim.adamw` imports this module on first use.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _kernel(
    param_ptr, grad_ptr, m_ptr, v_ptr, is_applied_ptr, size,
    beta1_rest, beta2, beta2_rest, v_factor, eps, weight_factor, step_size,
    IS_CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of a parameter and of its moments, unless ``is_applied`` is 0."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < tl.where(tl.load(is_applied_ptr) != 0, size, 0)
    param, grad = tl.load(param_ptr + index, mask=mask), tl.load(grad_ptr + index, mask=mask)
    m, v = tl.load(m_ptr + index, mask=mask), tl.load(v_ptr + index, mask=mask)
    m += (grad - m) * beta1_rest
    v = v * beta2 + grad * grad * beta2_rest
    decayed = param * weight_factor
    if IS_CAUTIOUS:
        decayed = tl.where(param * m >= 0, decayed, param)
    param = decayed - step_size * m / (tl.sqrt(v) * v_factor + eps)
    tl.store(param_ptr + index, param, mask=mask)
    tl.store(m_ptr + index, m, mask=mask)
    tl.store(v_ptr + index, v, mask=mask)


def update(row: tuple[Tensor, ...], t: int, group: dict[str, Any], is_applied: Tensor) -> None:
    """Update a parameter and its moments in place, if ``is_applied``, a float32 scalar on the device, is not 0.

    ``row`` has the parameter, its gradient and the two moments: contiguous, float32, of one shape. ``t`` is the number
    of this step, from 1; ``group`` has the options of :class:`lm.optim.adamw.AdamW`.
    """
    size, (beta1, beta2) = row[0].numel(), group["betas"]
    if not size:
        return
    with torch.cuda.device_of(row[0]):
        _kernel[(triton.cdiv(size, _BLOCK),)](
            *row,
            is_applied,
            size,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / math.sqrt(1 - beta2**t),
            group["eps"],
            1 - group["lr"] * group["weight_decay"],
            group["lr"] / (1 - beta1**t),
            IS_CAUTIOUS=group["is_cautious"],
            BLOCK=_BLOCK,
            num_warps=8,
        )
