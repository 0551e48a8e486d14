"""Products with weights of 8 or 16 bits, which few CPUs multiply as fast as float32.

A product of few rows reads them as they are. For many rows they are made float32, a part at a time. Weights of 8 bits
have a scale for each output: the largest weight of its row, divided by 127. Only weights are quantized, after training;
activations stay float32. Source: Dettmers et al. 2022 (LLM.int8(), row-wise absmax quantization).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lm.inference.config import Quantization
from lm.inference.cpu_decode import flat_matrix, multiply_few_rows, run_in_threads, split_evenly
from lm.kernels import few_rows

_MAX_INT8 = 127
_MAX_KERNEL_ROWS = 16  # more rows take longer than to make the weights float32 and multiply with those
_BLOCK_OUTPUTS = 4096


class NarrowLinear(nn.Module):
    """The product with several concatenated matrices, or with one, in their dtype or as int8.

    ``biases``, one for each matrix, are added.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = (), quantization: Quantization = "none") -> None:
        super().__init__()
        self.weight = torch.cat([weight.detach() for weight in weights])
        self.in_features = self.weight.shape[1]
        self.scale: Tensor | None = None
        if quantization == "int8":
            self.weight, self.scale = quantize(self.weight.float())
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        rows = x.flatten(0, -2)
        if len(rows) > _MAX_KERNEL_ROWS:
            out = self._multiply_blocks(rows)
        else:
            out = multiply_few_rows(self.weight, rows, self.scale)
        if self.bias is not None:
            out += self.bias
        return out.unflatten(0, x.shape[:-1])

    def _multiply_blocks(self, rows: Tensor) -> Tensor:
        """Make a part of the weights float32 and multiply with it, then the next: less memory than all at once."""
        outputs, columns = self.weight.shape
        x, out = rows.float(), torch.empty((len(rows), outputs))
        matrix, block = flat_matrix(self.weight, self.scale), torch.empty((min(_BLOCK_OUTPUTS, outputs), columns))
        for first in range(0, outputs, _BLOCK_OUTPUTS):
            size = min(_BLOCK_OUTPUTS, outputs - first)
            bounds = split_evenly(size, torch.get_num_threads())
            flat = block.view(-1).numpy()
            run_in_threads(
                few_rows.widen, [(matrix, first + start, first + end, flat[start * columns :]) for start, end in bounds]
            )
            torch.mm(x, block[:size].T, out=out[:, first : first + size])
        return out.to(rows.dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` (out, in) as int8, and the scale of each row (out), float32."""
    largest = weight.abs().amax(1)
    scale = torch.where(largest > 0, largest / _MAX_INT8, 1)  # a row of zeros stays one
    return (weight / scale[:, None]).round().to(torch.int8), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Invert :func:`quantize`, up to rounding by half of a scale."""
    return weight * scale[:, None]
