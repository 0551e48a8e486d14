"""Search for phrases in a text, 64 bytes at a time, without regard to the case of ASCII letters."""

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import low_bits
from lm.kernels.jit import ONE, Bytes, Int, Int64s, helper, inlined
from lm.kernels.simd import first_bit, in_range, read


@inlined
def _equals(byte: Int, expected: Int) -> bool:
    """Return whether a byte is ``expected``; a small letter also stands for its capital."""
    return bool(byte == expected or (0x61 <= expected <= 0x7A and byte | 0x20 == expected))


@helper
def has_phrase(data: Bytes, begin: Int, end: Int, phrases: Bytes, phrase_ends: Int64s, first: int, stop: int) -> bool:
    """Return whether ``data[begin:end]`` has one of the phrases ``first`` to ``stop`` − 1.

    A phrase is in small letters, begins with two letters and ends in ``phrases`` at its entry of ``phrase_ends``.
    """
    for phrase in range(first, stop):
        start = read(phrase_ends, phrase - 1) if phrase else np.int64(0)
        size = read(phrase_ends, phrase) - start
        a, b = np.int64(read(phrases, start)), np.int64(read(phrases, start + 1))
        last = end - size  # where it may begin at the latest
        for block in range(begin, last + 1, 64):
            found = in_range(data, block, 0x20, a, a) & in_range(data, block + 1, 0x20, b, b)
            found &= low_bits(min(last + 1 - block, 64))
            while found:
                at = block + first_bit(found)
                found &= found - ONE
                k = np.int64(2)
                while k < size and _equals(read(data, at + k), read(phrases, start + k)):
                    k += 1
                if k == size:
                    return True
    return False
