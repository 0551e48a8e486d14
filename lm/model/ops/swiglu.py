"""The gates of SwiGLU and GeGLU (Shazeer 2020), in blocks that fit a CPU's cache."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_ELEMENTS = 1 << 18  # of each tensor; the blocks of five tensors fit a CPU's cache together


class _Activation(NamedTuple):
    """An activation, and how its results and gradients are written into a tensor that is there."""

    function: Callable[[Tensor], Tensor]
    write: Callable[..., Tensor]
    """Inputs; ``out``."""
    write_gradient: Callable[..., Tensor]
    """Gradient of the result, inputs; ``grad_input``."""


_SILU = _Activation(F.silu, torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input)
_GELU = _Activation(
    partial(F.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu.out, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) ⊙ up``. Both inputs and the result have one shape."""
    return _multiply(_SILU, gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) ⊙ up``, with the tanh form of GELU. Both inputs and the result have one shape."""
    return _multiply(_GELU, gate, up)


def _multiply(activation: _Activation, gate: Tensor, up: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return activation.function(gate) * up
    if not torch.is_grad_enabled():
        return activation.function(gate).mul_(up)
    out: Tensor = _GatedProduct.apply(gate, up, activation)
    return out


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: _Activation) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for gate_block, up_block, out_block in _split_into_blocks(gate, up, out):
            activation.write(gate_block, out=out_block)
            out_block.mul_(up_block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        blocks = _split_into_blocks(grad.contiguous(), gate, up, grad_gate, grad_up)
        for grad_block, gate_block, up_block, grad_gate_block, grad_up_block in blocks:
            torch.mul(grad_block, ctx.activation.function(gate_block), out=grad_up_block)
            ctx.activation.write_gradient(grad_block * up_block, gate_block, grad_input=grad_gate_block)
        return grad_gate, grad_up, None


def _split_into_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of all ``tensors``, which have one shape. Only on a CPU is there more than one
    block."""
    matrices = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    is_on_cpu = matrices[0].device.type == "cpu"
    rows = max(1, _BLOCK_ELEMENTS // matrices[0].shape[-1]) if is_on_cpu else len(matrices[0])
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)
