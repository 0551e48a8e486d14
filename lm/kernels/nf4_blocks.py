"""Numbers of NF4 weights from their indices of levels. The reference is in :mod:`lm.model.nf4`."""

import numpy as np

from lm.kernels.jit import Bytes, Floats, Stored, kernel
from lm.kernels.simd import read, read_float, write, write_float


@kernel
def dequantize_blocks(
    indices: Bytes, largest: Floats, levels: Floats, scaled: Stored, numbers: Stored, begin: int, end: int
) -> None:
    """Write the numbers of the blocks from ``begin`` to ``end``, of 64 each: the block's ``largest`` times a level.

    ``indices`` (32 S,) for S blocks: two indices of ``levels`` (16,) a byte, the first in the upper bits. ``numbers``
    (64 S,) are float32, or bfloat16 as uint16. ``scaled`` (16,), of the same type, is a workspace.
    """
    for block in range(begin, end):
        for level in range(16):
            write_float(scaled, level, read_float(levels, level) * read_float(largest, block))
        for k in range(32 * block, 32 * block + 32):
            byte = np.int64(read(indices, k))
            write(numbers, 2 * k, read(scaled, byte >> 4))
            write(numbers, 2 * k + 1, read(scaled, byte & 15))
