"""The low-rank changes of adapters (LoRA): each row has an adapter of its own. The reference is torch's matmul.

The matrices are read where they are, once for each row. Memory bandwidth limits the speed.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.jit import Floats, Int, Int64s, fastmath_helper, fastmath_kernel
from lm.kernels.simd import dot, noinline, read, write

_BLOCK = np.int64(64)  # columns that the vector instructions compute; a loop adds the rest
RANK_MULTIPLE = 4  # rows of B that are added at once


class LowRankStack(NamedTuple):
    """The matrices of N adapters for P linear layers with the same input. They have the rank R, a multiple of 4."""

    numbers: Floats  # those of other layers too
    a_start: Int  # of A, (N, P R, columns)
    b_start: Int  # of B, (N, R, outputs): side by side for the P layers
    rank: Int
    columns: Int
    ends: Int64s  # of the outputs of each layer
    first_end: Int  # of the first of the P layers
    layers: Int


@fastmath_helper
def add_row(stack: LowRankStack, adapter: int, x: Floats, start: int, inner: Floats, out: Floats, place: int) -> None:
    """Add ``B A x[start:]`` of an adapter to ``out[place:]``. ``inner`` (P R,) is overwritten."""
    noinline()
    numbers, a_start, b_start, rank, columns, ends, first_end, layers = stack
    main = columns // _BLOCK * _BLOCK
    at = a_start + adapter * layers * rank * columns
    for i in range(layers * rank):
        (product,) = dot(numbers, at, x, start, main, columns)
        for column in range(main, columns):
            product += read(numbers, at + column) * read(x, start + column)
        write(inner, i, product)
        at += columns
    outputs, first = read(ends, first_end + layers - 1), np.int64(0)
    for layer in range(layers):
        last, at = read(ends, first_end + layer), b_start + adapter * rank * outputs
        for i in range(layer * rank, (layer + 1) * rank, RANK_MULTIPLE):
            h0, h1, h2, h3 = read(inner, i), read(inner, i + 1), read(inner, i + 2), read(inner, i + 3)
            for o in range(first, last):
                low, high = at + o, at + 2 * outputs + o
                change = h0 * read(numbers, low) + h1 * read(numbers, low + outputs)
                change += h2 * read(numbers, high) + h3 * read(numbers, high + outputs)
                write(out, place + o, read(out, place + o) + change)
            at += RANK_MULTIPLE * outputs
        first = last


@fastmath_kernel
def add_low_rank(
    stack: LowRankStack, adapters: Int64s, x: Floats, first: int, last: int, inner: Floats, out: Floats
) -> None:
    """Add to the rows ``first`` to ``last`` of ``out`` (rows, outputs) the changes of their adapters; 0 has none.

    ``x`` (rows, columns) and ``out`` are flat. Only this thread uses ``inner`` (P R,).
    """
    outputs = read(stack.ends, stack.first_end + stack.layers - 1)
    for row in range(first, last):
        adapter = read(adapters, row)
        if adapter != 0:
            add_row(stack, adapter, x, row * stack.columns, inner, out, row * outputs)
