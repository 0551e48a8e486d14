"""Weights as 8-bit integers. Each output has a scale: the largest weight of its row, divided by 127.

Only weights are quantized, after training; activations stay float32. Source: Dettmers et al. 2022 (LLM.int8(), row-wise
absmax quantization).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lm.inference.cpu_decode import multiply_few_rows, run_in_threads, split_evenly
from lm.kernels import few_rows
from lm.kernels.jit import log_compilation

_MAX_INT8 = 127
_MAX_KERNEL_ROWS = 16  # more rows take longer than to make the weights float32 and multiply with those
_BLOCK_OUTPUTS = 4096


class QuantizedLinear(nn.Module):
    """The product with several concatenated matrices, or with one, as int8.

    ``biases``, one for each matrix, are added.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = ()) -> None:
        super().__init__()
        weight = torch.cat([weight.detach().float() for weight in weights])
        self.in_features = weight.shape[1]
        self._weight, self._scale = quantize(weight)
        self._bias = torch.cat([bias.detach().float() for bias in biases]) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features), float32 → (..., out_features)."""
        rows = x.flatten(0, -2)
        if len(rows) > _MAX_KERNEL_ROWS:
            out = self._multiply_blocks(rows)
        else:
            out = multiply_few_rows(self._weight, rows, self._scale)
        if self._bias is not None:
            out += self._bias
        return out.unflatten(0, x.shape[:-1])

    def _multiply_blocks(self, rows: Tensor) -> Tensor:
        """Make a part of the weights float32 and multiply with it, then the next: less memory than all at once."""
        out = torch.empty((len(rows), len(self._weight)))
        block = torch.empty((min(_BLOCK_OUTPUTS, len(self._weight)), self.in_features))
        weight, scale, wide = (tensor.flatten().numpy() for tensor in (self._weight, self._scale, block))
        for first in range(0, len(self._weight), _BLOCK_OUTPUTS):
            size = min(_BLOCK_OUTPUTS, len(self._weight) - first)
            bounds = split_evenly(size, torch.get_num_threads())
            jobs = [
                (weight, scale, first + start, first + end, wide[start * self.in_features :]) for start, end in bounds
            ]
            run_in_threads(few_rows.widen, jobs)
            torch.mm(rows, block[:size].T, out=out[:, first : first + size])
        return out


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
