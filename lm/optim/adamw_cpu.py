"""AdamW's update in one kernel for CPUs, which reads and writes each number in memory once, in threads."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm.hardware.kernel_threads import run_in_threads, split_for_threads
from lm.kernels.adamw_update import update_numbers

_PART = 1 << 16  # fewest numbers for a thread: starting one takes longer than updating fewer
_TYPES = {Tensor, nn.Parameter}  # other subclasses, such as fake tensors, may have no memory of their own


def update_on_cpu(rows: list[tuple[Tensor, ...]], t: int, group: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Update parameters and moments in place. Return the rows that the kernel cannot update.

    A row has a parameter, its gradient and the two moments. The kernel needs them of one shape, contiguous and float32.
    ``t`` is the number of this step, from 1; ``group`` has the options of :class:`lm.optim.adamw.AdamW`. The result has
    the same bits with any number of threads. Parameters must not share memory.
    """
    updated: list[tuple[Tensor, ...]] = []
    others: list[tuple[Tensor, ...]] = []
    for row in rows:
        has_one_shape = all(x.shape == row[0].shape for x in row)  # the kernel would write past a smaller tensor
        (updated if has_one_shape and all(map(_is_float32_in_memory, row)) else others).append(row)
    if not updated:
        return others
    addresses = np.array([(row[0].numel(), *(x.data_ptr() for x in row)) for row in updated], np.int64)
    (beta1, beta2), lr = group["betas"], group["lr"]
    options = (
        *(1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**t), group["eps"]),
        *(1 - lr * group["weight_decay"], lr / (1 - beta1**t)),
    )
    count = int(addresses[:, 0].sum())
    parts = split_for_threads(count, _PART)
    is_cautious = bool(group["is_cautious"])
    run_in_threads(update_numbers, [(addresses, *part, *map(float, options), is_cautious) for part in parts])
    torch.autograd.graph.increment_version([row[0] for row in updated])  # as torch's operators in place do
    return others


def _is_float32_in_memory(x: Tensor) -> bool:
    return type(x) in _TYPES and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
