"""Pretoken starts by GPT-2's pattern: 64 bytes at a time, as masks with one bit per byte.

The reference is the ``regex`` pattern in :mod:`lm.text.pretokenize`. A run of letters, digits or other characters
starts a pretoken, unless the space before it does. A run of whitespace starts one; so does its last character if
something else follows.
"""

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import (
    APOSTROPHE,
    SPACE,
    add_non_ascii,
    class_at,
    contraction_length,
    low_bits,
    move_to_first_bytes,
    write_starts,
)
from lm.kernels.bpe.scanners.character_classes import WHITESPACE
from lm.kernels.jit import ONE, Bytes, Int32s, helper, inlined
from lm.kernels.simd import first_bit, in_range, read


@helper
def find_gpt2_starts(buffer: Bytes, begin: int, end: int, classes: Bytes, rules: None, starts: Int32s) -> int:
    """Write the start of each pretoken of the text ``buffer[begin:end]`` to ``starts`` (end − begin + 64,).

    ``classes`` (0x110000,) is the class of each code point. Returns the number of pretokens, or a status below 0.
    """
    count = 0
    letter_carry = digit_carry = other_carry = space_carry = whitespace_carry = np.uint64(0)  # of the byte before
    removed_next = added_next = np.uint64(0)  # starts in the next block that a contraction removes and adds
    block = begin
    while block < end:
        size = end - block if end - block < 64 else 64
        valid = low_bits(size)
        letters = in_range(buffer, block, 0x20, 0x61, 0x7A) & valid
        digits = in_range(buffer, block, 0, 0x30, 0x39) & valid
        spaces = in_range(buffer, block, 0, SPACE, SPACE) & valid
        whitespace = spaces | (in_range(buffer, block, 0, 0x09, 0x0D) & valid)
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        tails = np.uint64(0)
        if non_ascii:
            size, letters, digits, whitespace, tails = add_non_ascii(
                buffer, block, end, size, non_ascii, letters, digits, whitespace, classes
            )
            if size < 0:
                return size
            valid = low_bits(size)
            spaces &= valid
        others = valid & ~(letters | digits | whitespace)

        # Whitespace: a run starts a pretoken; so does its last character if something else follows.
        following = (valid & ~whitespace) >> ONE
        if block + size < end:
            byte = np.int64(read(buffer, block + size))
            next_class = np.int64(read(classes, byte)) if byte < 0x80 else class_at(buffer, block + size, end, classes)
            following |= np.uint64(next_class != WHITESPACE) << np.uint64(size - 1)
        last = move_to_first_bytes(whitespace & following, tails)
        begins = (whitespace & ~(whitespace << ONE | whitespace_carry)) | last

        # Other classes: a run starts a pretoken, unless a space before it already does.
        runs = letters & ~(letters << ONE | letter_carry) | digits & ~(digits << ONE | digit_carry)
        other_runs = others & ~(others << ONE | other_carry) & ~(spaces << ONE | space_carry)
        begins |= runs & ~(spaces << ONE | space_carry) | other_runs

        begins = (begins & ~removed_next) | added_next
        removed_next = added_next = np.uint64(0)
        apostrophes = in_range(buffer, block, 0, APOSTROPHE, APOSTROPHE) & other_runs
        while apostrophes:
            k = first_bit(apostrophes)
            apostrophes &= apostrophes - ONE
            length = contraction_length(buffer, block + k, end, 0)
            if length:
                if k + 1 < size:
                    begins &= ~(ONE << np.uint64(k + 1))
                else:
                    removed_next |= ONE << np.uint64(k + 1 - size)
                if block + k + length < end:
                    if k + length < size:
                        begins |= ONE << np.uint64(k + length)
                    else:
                        added_next |= ONE << np.uint64(k + length - size)

        count = write_starts(begins, block, starts, count)
        top = np.uint64(size - 1)
        letter_carry, digit_carry, other_carry = letters >> top, digits >> top, others >> top
        space_carry, whitespace_carry = spaces >> top, whitespace >> top
        block += size
    return count


@inlined
def never_joins(buffer: Bytes, begin: int, position: int, end: int, classes: Bytes) -> bool:
    """Return False: text after the end of a scan joins no pretokens before its last one."""
    return False
