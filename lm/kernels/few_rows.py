"""Products of a few rows with a matrix of float32, bfloat16 (as uint16) or int8. The reference is torch's product.

Such a product can be as fast as the weights are read. On CPUs without AVX-512, torch's and oneDNN's take twice as long,
and torch's product with int8 (``_weight_int8pack_mm``) ten times as long.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from lm.kernels.jit import fastmath_helper, fastmath_kernel
from lm.kernels.simd import dot, dot_of_four, read, read_float, write

Weights = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_BLOCK = np.int64(64)  # columns that the vector instructions compute; the rest is added one by one


@fastmath_helper
def _rest(weights: Weights, at: int, x: Floats, xt: int, first: int, columns: int) -> np.float32:
    total = np.float32(0)
    for i in range(first, columns):
        total += read_float(weights, at + i) * read(x, xt + i)
    return total


@fastmath_kernel
def multiply(weights: Weights, scales: Floats, x: Floats, first: int, last: int, out: Floats, outputs: int) -> None:
    """Write ``x @ (scales[:, None] * weights).T`` to ``out``, for the outputs ``first`` to ``last``.

    All arrays are flat: ``weights`` (outputs, columns), ``scales`` (outputs) or empty, ``x`` (rows, columns), ``out``
    (rows, outputs).
    """
    columns = len(weights) // outputs
    rows = len(x) // columns
    main = columns // _BLOCK * _BLOCK
    for output in range(first, last):
        scale = read(scales, output) if len(scales) else np.float32(1)
        at = output * columns
        row = 0
        while row + 4 <= rows:
            xt = row * columns
            a, b, c, d = dot_of_four(weights, at, x, xt, main, columns)
            if main < columns:
                a += _rest(weights, at, x, xt, main, columns)
                b += _rest(weights, at, x, xt + columns, main, columns)
                c += _rest(weights, at, x, xt + 2 * columns, main, columns)
                d += _rest(weights, at, x, xt + 3 * columns, main, columns)
            write(out, row * outputs + output, a * scale)
            write(out, (row + 1) * outputs + output, b * scale)
            write(out, (row + 2) * outputs + output, c * scale)
            write(out, (row + 3) * outputs + output, d * scale)
            row += 4
        while row < rows:
            xt = row * columns
            total = dot(weights, at, x, xt, main) + _rest(weights, at, x, xt, main, columns)
            write(out, row * outputs + output, total * scale)
            row += 1


@fastmath_kernel
def widen(weights: Weights, scales: Floats, first: int, last: int, out: Floats) -> None:
    """Write the rows ``first`` to ``last`` of ``scales[:, None] * weights`` to ``out``; see :func:`multiply`."""
    columns = len(weights) // len(scales)
    for row in range(first, last):
        scale, at, to = read(scales, row), row * columns, (row - first) * columns
        for i in range(columns):
            write(out, to + i, read_float(weights, at + i) * scale)
