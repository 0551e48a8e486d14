"""Matmul of a small batch with weights of float32, bfloat16 (as uint16) or int8. The reference is torch's matmul.

Memory bandwidth limits its speed. On CPUs without AVX-512, torch's and oneDNN's matmuls take twice as long, and
torch's matmul with int8 (``_weight_int8pack_mm``) ten times as long.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.jit import Floats, Int, Stored, fastmath_helper, fastmath_kernel
from lm.kernels.simd import dot, dot_two_by_four, noinline, read, read_float, write


class Matrix(NamedTuple):
    """A matrix (outputs, columns) in flat arrays, which may hold others too."""

    weights: Stored
    scales: Floats  # of the rows; empty without them
    weights_start: Int
    scales_start: Int
    outputs: Int
    columns: Int


_TILE: int = 16  # outputs; their weights stay in the CPU's cache for all rows of x
_BLOCK = np.int64(64)  # columns that the vector instructions compute; a loop adds the rest


@fastmath_helper
def _add_rest(total: np.float32, weights: Stored, at: int, x: Floats, xt: int, first: int, columns: int) -> np.float32:
    for i in range(first, columns):
        total += read_float(weights, at + i) * read(x, xt + i)
    return total


@fastmath_kernel
def matmul(matrix: Matrix, x: Floats, rows: int, first: int, last: int, out: Floats) -> None:
    """Write ``x @ (scales[:, None] * weights).T`` to ``out``, for the outputs ``first`` to ``last``.

    ``x`` (rows, columns) and ``out`` (rows, outputs) are flat.
    """
    matmul_rows(matrix, x, rows, first, last, out)


@fastmath_helper
def matmul_rows(matrix: Matrix, x: Floats, rows: int, first: int, last: int, out: Floats) -> None:
    """Compute :func:`matmul`.

    A single row is multiplied with one row of weights after the other: memory is read fastest in order.
    """
    noinline()
    weights, scales, weights_start, scales_start, outputs, columns = matrix
    main = columns // _BLOCK * _BLOCK
    for tile in range(first, last, _TILE):
        tile_end, row = min(tile + _TILE, last), 0
        while row < rows:
            num_rows = 4 if row + 4 <= rows else 1
            xt, output = row * columns, tile
            while output < tile_end:
                at, place = weights_start + output * columns, row * outputs + output
                if num_rows == 4 and output + 2 <= tile_end:
                    products = dot_two_by_four(weights, at, x, xt, main, columns)
                    for i in range(8):
                        write(out, place + i % 4 * outputs + i // 4, products[i])
                    output += 2
                else:
                    for i in range(num_rows):
                        (product,) = dot(weights, at, x, xt + i * columns, main, columns)
                        write(out, place + i * outputs, product)
                    output += 1
            row += num_rows
    if main < columns:
        for row in range(rows):
            for output in range(first, last):
                at, xt, place = weights_start + output * columns, row * columns, row * outputs + output
                write(out, place, _add_rest(read(out, place), weights, at, x, xt, main, columns))
    if len(scales):
        for row in range(rows):
            for output in range(first, last):
                place = row * outputs + output
                write(out, place, read(out, place) * read(scales, scales_start + output))


@fastmath_kernel
def dequantize(matrix: Matrix, first: int, last: int, out: Floats) -> None:
    """Write the rows ``first`` to ``last`` of ``scales[:, None] * weights`` to ``out``."""
    for row in range(first, last):
        scale = read(matrix.scales, matrix.scales_start + row) if len(matrix.scales) else np.float32(1)
        at, to = matrix.weights_start + row * matrix.columns, (row - first) * matrix.columns
        for i in range(matrix.columns):
            write(out, to + i, read_float(matrix.weights, at + i) * scale)
