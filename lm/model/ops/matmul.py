"""Matmuls of linear layers. On CPUs not made by Intel, float32 matmuls run on oneDNN.

Shapes: N rows, D inputs, V outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.hardware.device import PREFERS_ONEDNN


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x weightᵀ``: (..., D), (V, D) → (..., V)."""
    if _uses_onednn(x) and not torch.is_autocast_enabled("cpu"):
        out: Tensor = _Linear.apply(x, weight)
        return out
    return F.linear(x, weight)


def linear_forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x weightᵀ`` without recording a graph for autograd: (..., D), (V, D) → (..., V)."""
    if not _uses_onednn(x):
        return x @ weight.T
    if torch.compiler.is_compiling():
        return _onednn_linear_op(x, weight)
    return _onednn_linear(x, weight)


def linear_weight_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Return ``gradᵀ x``, the gradient of the weight: (N, D), (N, V) → (V, D)."""
    if grad.shape[-1] > x.shape[-1]:  # oneDNN is faster with the wider factor on this side
        return linear_forward(x.T, grad.T).T
    return linear_forward(grad.T, x.T)


def count_padding_rows(rows: int) -> int:
    """Return how many rows to pad. Padding rounds up to one of eight sizes between powers of two, because oneDNN
    compiles code for each size (slow) and caches a thousand of them (megabytes each)."""
    return -rows % (1 << max(0, (rows - 1).bit_length() - 4))


def runs_on_mkl(x: Tensor) -> bool:
    """Return whether MKL multiplies ``x``, which needs no padding."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not PREFERS_ONEDNN


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)  # a frozen matrix needs no input
        return linear_forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_weight = linear_weight_grad(x.flatten(0, -2), grad.flatten(0, -2)) if needs_weight else None
        return linear_forward(grad, weight.T) if needs_x else None, grad_weight


def _uses_onednn(x: Tensor) -> bool:
    """Return whether oneDNN multiplies ``x`` in float32."""
    rows = x.numel() // x.shape[-1]  # below 64, oneDNN's start-up costs more than it saves
    return x.device.type == "cpu" and x.dtype == torch.float32 and rows >= 64 and PREFERS_ONEDNN


def _onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out


# torch.compile supports mkldnn's own operator for constant weights only.
_onednn_linear_op = torch.library.custom_op("textmill::onednn_linear", _onednn_linear, mutates_args=())


@_onednn_linear_op.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
