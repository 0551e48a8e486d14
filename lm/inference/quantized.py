"""Weights as 8-bit integers. Each output has a scale: the largest weight of its row, divided by 127.

Only weights are quantized, after training; activations stay float32. Source: Dettmers et al. 2022 (LLM.int8(), row-wise
absmax quantization).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.inference.cpu_decode import run_in_threads
from lm.kernels import int8_product
from lm.kernels.jit import log_compilation

_MAX_INT8 = 127
_MAX_KERNEL_ROWS = 16  # more rows take longer than to make the weights float32 and multiply with those
_BLOCK_OUTPUTS = 512
_MIN_BYTES_FOR_THREADS = 1 << 20  # of a matrix; below, waking threads takes longer than it saves


class QuantizedLinear(nn.Module):
    """The product with several concatenated matrices, or with one, as int8.

    ``biases``, one for each matrix, are added.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = ()) -> None:
        super().__init__()
        weight = torch.cat([weight.detach().float() for weight in weights])
        self.in_features = weight.shape[1]
        numbers, self._scale = quantize(weight)
        self._weight = F.pad(numbers, (0, -self.in_features % int8_product.BLOCK))
        self._bias = torch.cat([bias.detach().float() for bias in biases]) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features), float32 → (..., out_features)."""
        rows = x.flatten(0, -2)
        padded = F.pad(rows, (0, self._weight.shape[1] - self.in_features)).contiguous()
        out = torch.empty((len(rows), len(self._weight)))
        if len(rows) > _MAX_KERNEL_ROWS:
            self._multiply_blocks(padded, out)
        else:
            self._multiply(padded, out)
        if self._bias is not None:
            out += self._bias
        return out.unflatten(0, x.shape[:-1])

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        outputs = len(self._weight)
        threads = torch.get_num_threads() if self._weight.numel() > _MIN_BYTES_FOR_THREADS else 1
        bounds = [outputs * part // threads for part in range(threads + 1)]
        weight, scale, x, y = (tensor.flatten().numpy() for tensor in (self._weight, self._scale, rows, out))
        jobs = [(weight, scale, x, first, last, y) for first, last in zip(bounds, bounds[1:], strict=False)]
        run_in_threads(int8_product.multiply, jobs)

    def _multiply_blocks(self, rows: Tensor, out: Tensor) -> None:
        """Make a part of the weights float32, small enough for the CPU's cache, and multiply with it; then the next."""
        block = torch.empty((_BLOCK_OUTPUTS, rows.shape[1]))
        weight, scale, wide = (tensor.flatten().numpy() for tensor in (self._weight, self._scale, block))
        for first in range(0, len(self._weight), _BLOCK_OUTPUTS):
            last = min(first + _BLOCK_OUTPUTS, len(self._weight))
            int8_product.widen(weight, scale, first, last, wide)
            torch.mm(rows, block[: last - first].T, out=out[:, first:last])


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` (out, in) as int8, and the scale of each row (out), float32."""
    largest = weight.abs().amax(1)
    scale = torch.where(largest > 0, largest / _MAX_INT8, 1)  # a row of zeros stays one
    return (weight / scale[:, None]).round().to(torch.int8), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Invert :func:`quantize`, up to rounding by half of a scale."""
    return weight * scale[:, None]


def compile_product() -> None:
    """Compile the kernels, and log it."""
    with log_compilation("int8"):
        for rows in (1, _MAX_KERNEL_ROWS + 1):
            QuantizedLinear(torch.ones(1, 1))(torch.ones(rows, 1))
