"""The gates of SwiGLU and GeGLU (Shazeer 2020), in blocks that fit a CPU's cache."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_ELEMENTS = 1 << 18  # of each tensor; the blocks of five tensors fit a CPU's cache together


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) ⊙ up``. Both inputs and the result have one shape."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return F.silu(gate) * up
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) ⊙ up``, with the tanh form of GELU. Both inputs and the result have one shape."""
    if torch.compiler.is_compiling():
        return F.gelu(gate, approximate="tanh") * up
    if not torch.is_grad_enabled():
        return F.gelu(gate, approximate="tanh").mul_(up)
    out: Tensor = _GeGLU.apply(gate, up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for gate_block, up_block, out_block in _split_into_blocks(gate, up, out):
            torch.ops.aten.silu.out(gate_block, out=out_block)
            out_block.mul_(up_block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        blocks = _split_into_blocks(grad.contiguous(), gate, up, grad_gate, grad_up)
        for grad_block, gate_block, up_block, grad_gate_block, grad_up_block in blocks:
            torch.mul(grad_block, F.silu(gate_block), out=grad_up_block)
            torch.ops.aten.silu_backward.grad_input(grad_block * up_block, gate_block, grad_input=grad_gate_block)
        return grad_gate, grad_up


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for gate_block, up_block, out_block in _split_into_blocks(gate, up, out):
            torch.mul(F.gelu(gate_block, approximate="tanh"), up_block, out=out_block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        blocks = _split_into_blocks(grad.contiguous(), gate, up, grad_gate, grad_up)
        for grad_block, gate_block, up_block, grad_gate_block, grad_up_block in blocks:
            torch.mul(grad_block, F.gelu(gate_block, approximate="tanh"), out=grad_up_block)
            grad_gate_block.copy_(torch.ops.aten.gelu_backward(grad_block * up_block, gate_block, approximate="tanh"))
        return grad_gate, grad_up


def _split_into_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of all ``tensors``, which have one shape. Only on a CPU is there more than one
    block."""
    matrices = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    is_on_cpu = matrices[0].device.type == "cpu"
    rows = max(1, _BLOCK_ELEMENTS // matrices[0].shape[-1]) if is_on_cpu else len(matrices[0])
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)
