"""Frozen linear layers in 4 bits: NormalFloat with double quantization (NF4).

Sources: Dettmers et al. 2023 (QLoRA: the data type, and the quantization of its scales); Dettmers et al. 2022 (the
8-bit data type of the scales). Values are those of the library bitsandbytes.
Shapes: O out_features, I in_features, P = O · I, S = P / 64 blocks, both rounded up.
"""

import threading
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lm.hardware.kernel_threads import run_in_threads, split_for_threads
from lm.kernels.nf4_blocks import dequantize_blocks
from lm.model.linear import Linear
from lm.model.ops.matmul import linear_forward

_BLOCK, _SCALE_BLOCK = 64, 256
_PART = 1 << 14  # blocks for a thread: fewer are done before another thread starts
_memory = threading.local()
# Appendix E of the paper: quantiles of a normal distribution, with an exact 0.
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class NF4Weight(NamedTuple):
    """A matrix in 4.13 bits a number."""

    levels: Tensor
    """(P / 2,) uint8: two indices of levels, the first in the upper bits."""
    scales: Tensor
    """(S,) uint8: the largest magnitude of each block of 64, less ``mean``, as indices of 8-bit levels."""
    scale_scales: Tensor
    """(S / 256,) float32: the largest magnitude of each block of 256 of these."""
    mean: Tensor
    """Scalar, float32."""


def quantize_nf4(weight: Tensor) -> NF4Weight:
    """Return the nearest NF4 numbers of a matrix (O, I), or of any tensor; a block of zeros stays zero."""
    blocks = _pad(weight.detach().float().flatten(), _BLOCK).view(-1, _BLOCK)
    largest = blocks.abs().amax(1)
    indices = _nearest(blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None], _nf4_levels(weight.device))
    pairs = indices.view(-1, 2)
    mean = largest.mean()
    centered = _pad(largest - mean, _SCALE_BLOCK).view(-1, _SCALE_BLOCK)
    scale_scales = centered.abs().amax(1)
    tiny = torch.finfo(torch.float32).tiny
    scales = _nearest(centered / scale_scales.clamp(min=tiny)[:, None], _dynamic_levels(weight.device))
    return NF4Weight((pairs[:, 0] << 4) | pairs[:, 1], scales.flatten()[: len(largest)].clone(), scale_scales, mean)


def dequantize_nf4(weight: NF4Weight, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of a tensor of ``shape``."""
    # A look-up of a byte gives both of its numbers.
    pairs = F.embedding(weight.levels.int(), _level_pairs(weight.levels.device))
    blocks = pairs.view(-1, _BLOCK).mul_(_restore_scales(weight)[:, None])
    return blocks.flatten()[: torch.Size(shape).numel()].view(shape).to(dtype)


def dequantize_on_cpu(weight: NF4Weight, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return what :func:`dequantize_nf4` does, by a kernel, in memory that the thread's next call overwrites.

    A weight is needed for one product only, and new memory would take longer than the numbers. ``dtype`` is float32
    or bfloat16.
    """
    largest = _restore_scales(weight)
    size = len(largest) * _BLOCK
    memory = getattr(_memory, "bytes", None)
    if memory is None or len(memory) < size * dtype.itemsize:
        memory = _memory.bytes = torch.empty(size * dtype.itemsize, dtype=torch.uint8)
    numbers = memory[: size * dtype.itemsize].view(torch.float32 if dtype == torch.float32 else torch.uint16)
    arrays = (weight.levels.numpy(), largest.numpy(), _nf4_levels(largest.device).numpy())
    parts = split_for_threads(len(largest), _PART)
    workspaces = (torch.empty(16, dtype=numbers.dtype).numpy() for _ in parts)
    jobs = [(*arrays, scaled, numbers.numpy(), *part) for scaled, part in zip(workspaces, parts, strict=True)]
    run_in_threads(dequantize_blocks, jobs)
    return numbers.view(dtype)[: torch.Size(shape).numel()].view(shape)


def _restore_scales(weight: NF4Weight) -> Tensor:
    """Return the largest magnitude of each block of 64, float32 (S,)."""
    centered = F.embedding(_pad(weight.scales, _SCALE_BLOCK).int(), _dynamic_levels(weight.scales.device)[:, None])
    scaled = centered.view(-1, _SCALE_BLOCK) * weight.scale_scales[:, None]
    return scaled.flatten()[: len(weight.scales)] + weight.mean


def _pad(values: Tensor, multiple: int) -> Tensor:
    return F.pad(values, (0, -len(values) % multiple))


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the nearest of the sorted ``levels`` for each value, uint8."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


@cache
def _nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(_LEVELS, device=device)


@cache
def _level_pairs(device: torch.device) -> Tensor:
    """Return the two numbers of each byte, (256, 2)."""
    levels, byte = _nf4_levels(device), torch.arange(256, device=device)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], 1)


@cache
def _dynamic_levels(device: torch.device) -> Tensor:
    """Return the 256 numbers of the dynamic 8-bit data type, sorted: 0, 1, and for the exponents 0 … 6 of ten and both
    signs the centers of 2^e equal parts of 0.1 … 1."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, (1 << exponent) + 1)
        centers = 10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*centers.tolist(), *(-centers).tolist()]
    return torch.tensor(sorted(values), device=device)


class NF4Linear(nn.Module):
    """A frozen :class:`lm.model.linear.Linear` in 4 bits, which computes in the dtype of its input, or of autocast.

    The matrix is dequantized in each forward pass and in each backward pass. A CPU keeps the memory of the largest one.
    """

    bias_role = Linear.bias_role

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.role, self.bias = layer.role, layer.bias
        self.shape = layer.shape
        for name, tensor in quantize_nf4(layer.weight)._asdict().items():
            self.register_buffer(name, tensor)

    @property
    def quantized(self) -> NF4Weight:
        """The matrix."""
        return NF4Weight(*(self.get_buffer(name) for name in NF4Weight._fields))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) → (..., O)."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        out: Tensor = _NF4Product.apply(x, self.shape, *self.quantized)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def dequantize(self) -> Linear:
        """Return a layer with the same numbers in float32."""
        out_features, in_features = self.shape
        layer = Linear(in_features, out_features, "meta", role=self.role)
        layer.weight = nn.Parameter(dequantize_nf4(self.quantized, self.shape))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias.data.float())
        return layer


class _NF4Product(torch.autograd.Function):
    """``x Wᵀ`` with the gradient of ``x`` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], *quantized: Tensor) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*quantized)
        return linear_forward(x, _weight_of_product(quantized, shape, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = _weight_of_product(ctx.saved_tensors, ctx.shape, grad)
        return linear_forward(grad, weight.T), None, None, None, None, None


def _weight_of_product(quantized: tuple[Tensor, ...], shape: tuple[int, ...], factor: Tensor) -> Tensor:
    """Return a matrix in the dtype of ``factor``, for one product with it."""
    has_kernel = factor.device.type == "cpu" and factor.dtype in (torch.float32, torch.bfloat16)
    dequantize = dequantize_on_cpu if has_kernel and not torch.compiler.is_compiling() else dequantize_nf4
    return dequantize(NF4Weight(*quantized), shape, factor.dtype)
