"""Product of a few rows with a matrix of int8. The reference is :func:`lm.inference.quantized.dequantize`.

torch's own (``_weight_int8pack_mm``) has no vector instructions on CPUs without AVX-512: it takes ten times as long.
"""

import numpy as np
import numpy.typing as npt

from lm.kernels.jit import fastmath_kernel
from lm.kernels.simd import dot_int8, dot_int8_of_four, read, write

Int8s = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]

BLOCK = 64  # divides the number of columns


@fastmath_kernel
def multiply(weights: Int8s, scales: Floats, x: Floats, first: int, last: int, out: Floats) -> None:
    """Write ``x @ (scales[:, None] * weights).T`` to ``out``, for the outputs ``first`` to ``last``.

    All arrays are flat: ``weights`` (outputs, columns), ``scales`` (outputs), ``x`` (rows, columns), ``out`` (rows,
    outputs).
    """
    outputs = len(scales)
    columns = len(weights) // outputs
    rows = len(x) // columns
    for output in range(first, last):
        scale, at = read(scales, output), output * columns
        row = 0
        while row + 4 <= rows:
            a, b, c, d = dot_int8_of_four(weights, at, x, row * columns, columns)
            write(out, row * outputs + output, a * scale)
            write(out, (row + 1) * outputs + output, b * scale)
            write(out, (row + 2) * outputs + output, c * scale)
            write(out, (row + 3) * outputs + output, d * scale)
            row += 4
        while row < rows:
            write(out, row * outputs + output, dot_int8(weights, at, x, row * columns, columns) * scale)
            row += 1


@fastmath_kernel
def widen(weights: Int8s, scales: Floats, first: int, last: int, out: Floats) -> None:
    """Write the rows ``first`` to ``last`` of ``scales[:, None] * weights`` to ``out``; see :func:`multiply`."""
    columns = len(weights) // len(scales)
    for row in range(first, last):
        scale, at, to = read(scales, row), row * columns, (row - first) * columns
        for i in range(columns):
            write(out, to + i, np.float32(read(weights, at + i)) * scale)
