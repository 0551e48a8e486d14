"""Pretoken starts by GPT-2's pattern: 64 bytes at a time, as masks with one bit per byte.

The reference is the ``regex`` pattern in :mod:`lm.text.pretokenize`. Each byte belongs to one class: letter, digit,
whitespace or other; all bytes of a character have its class. ``letters & ~(letters << 1)`` then marks the start of each
run of letters; one carry bit per class leads from block to block.
"""

import numpy as np

from lm.kernels.bpe.classes import DIGIT, LETTER, OTHER, WHITESPACE
from lm.kernels.jit import INVALID_UTF8, Bytes, Int, Int32s, Word, helper, inlined
from lm.kernels.simd import CAN_COMPRESS_BYTES, bit_count, first_bit, in_range, read, store_places, write

STARTS_PADDING = 65  # more entries of ``starts`` than bytes: excess of the last block, and the end of the text
_ONE = np.uint64(1)
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)
_APOSTROPHE, _SPACE = 0x27, 0x20


@inlined
def low_bits(n: int) -> Word:
    """Return a mask of the ``n`` lowest bits, 0 ≤ n ≤ 64."""
    return _ALL_BITS >> np.uint64(64 - n) if n > 0 else np.uint64(0)


@inlined
def character_at(buffer: Bytes, position: int, end: int) -> tuple[Int, Int]:
    """Return (code point, length in bytes) of the UTF-8 character at ``position``; length 0 if it is not valid.

    As in the Unicode standard, surrogates, overlong forms, code points above U+10FFFF and characters that do not end
    by ``end`` are not valid.
    """
    first = np.int64(read(buffer, position))
    if first < 0x80:
        return first, 1
    if first < 0xC2 or first > 0xF4:
        return 0, 0
    length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if position + length > end:
        return 0, 0
    point = first & (0x7F >> length)
    for k in range(1, length):
        byte = np.int64(read(buffer, position + k))
        if byte & 0xC0 != 0x80:
            return 0, 0
        point = point << 6 | byte & 0x3F
    if (length == 3 and (point < 0x800 or 0xD800 <= point <= 0xDFFF)) or (
        length == 4 and (point < 0x10000 or point > 0x10FFFF)
    ):
        return 0, 0
    return point, length


@inlined
def class_at(buffer: Bytes, position: int, end: int, classes: Bytes) -> Int:
    """Return the class of the character at ``position``; OTHER if it is not valid."""
    point, length = character_at(buffer, position, end)
    return np.int64(read(classes, point)) if length else OTHER


@inlined
def class_before(buffer: Bytes, begin: int, position: int, classes: Bytes) -> Int:
    """Return the class of the character before ``position``, which begins at ``begin`` or later."""
    start = position - 1
    while start > begin and read(buffer, start) & 0xC0 == 0x80:
        start -= 1
    return class_at(buffer, start, position, classes)


@inlined
def contraction_length(buffer: Bytes, position: int, end: int) -> int:
    """Return the length of the contraction (``'s``, ``'ll``, ...) at an apostrophe; 0 if there is no contraction."""
    if position + 1 < end:
        a = read(buffer, position + 1)
        if a == 0x73 or a == 0x64 or a == 0x6D or a == 0x74:  # s d m t
            return 2
        if position + 2 < end:
            b = read(buffer, position + 2)
            if (a == 0x6C and b == 0x6C) or ((a == 0x76 or a == 0x72) and b == 0x65):  # ll ve re
                return 3
    return 0


@helper
def classify_non_ascii(
    buffer: Bytes,
    block: int,
    end: int,
    size: int,
    non_ascii: Word,
    letters: Word,
    digits: Word,
    whitespace: Word,
    classes: Bytes,
) -> tuple[int, Word, Word, Word, Word]:
    """Add the non-ASCII characters of the 64-byte block at ``block`` to its masks.

    Returns (size, letters, digits, whitespace, tails). ``size`` shrinks if a character crosses the end of the block, or
    is a status below 0. ``tails`` marks the bytes of whitespace characters except each first byte.
    """
    tails = np.uint64(0)
    while non_ascii:
        k = first_bit(non_ascii)
        point, length = character_at(buffer, block + k, end)
        if length == 0:
            return INVALID_UTF8 - (block + k), letters, digits, whitespace, tails
        if k + length > 64:
            size = k
            break
        bits = low_bits(length) << np.uint64(k)
        non_ascii &= ~bits
        character_class = read(classes, point)
        if character_class == LETTER:
            letters |= bits
        elif character_class == DIGIT:
            digits |= bits
        elif character_class == WHITESPACE:
            whitespace |= bits
            tails |= bits & (bits << _ONE)
    valid = low_bits(size)
    return size, letters & valid, digits & valid, whitespace & valid, tails & valid


@inlined
def move_to_first_bytes(bits: Word, continuation: Word) -> Word:
    """Move the bits of last bytes of characters to their first bytes; ``continuation`` marks all other bytes."""
    while bits & continuation:
        bits = (bits & ~continuation) | ((bits & continuation) >> _ONE)
    return bits


@inlined
def write_starts(begins: Word, block: int, starts: Int32s, count: int) -> int:
    """Write the positions of the bits of ``begins``, a mask of the block at ``block``, to ``starts`` from ``count``.

    Up to 63 more entries are overwritten; the next block writes them again. Returns the new count.
    """
    if CAN_COMPRESS_BYTES:
        store_places(starts, count, begins, block)
        return count + bit_count(begins)
    return write_starts_by_bit(begins, block, starts, count)


@inlined
def write_starts_by_bit(begins: Word, block: int, starts: Int32s, count: int) -> int:
    """Do what :func:`write_starts` does, 8 positions at a time, which the branch predictor likes."""
    total = count + bit_count(begins)
    while count < total:
        for _ in range(8):
            write(starts, count, np.int32(block + first_bit(begins)))
            begins &= begins - _ONE
            count += 1
    return total


@helper
def find_pretoken_starts(buffer: Bytes, begin: int, end: int, classes: Bytes, starts: Int32s) -> int:
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
        spaces = in_range(buffer, block, 0, _SPACE, _SPACE) & valid
        whitespace = spaces | (in_range(buffer, block, 0, 0x09, 0x0D) & valid)
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        tails = np.uint64(0)
        if non_ascii:
            size, letters, digits, whitespace, tails = classify_non_ascii(
                buffer, block, end, size, non_ascii, letters, digits, whitespace, classes
            )
            if size < 0:
                return size
            valid = low_bits(size)
            spaces &= valid
        others = valid & ~(letters | digits | whitespace)

        # Whitespace: a run starts a pretoken; so does its last character if something else follows.
        following = (valid & ~whitespace) >> _ONE
        if block + size < end:
            byte = np.int64(read(buffer, block + size))
            next_class = np.int64(read(classes, byte)) if byte < 0x80 else class_at(buffer, block + size, end, classes)
            following |= np.uint64(next_class != WHITESPACE) << np.uint64(size - 1)
        last = move_to_first_bytes(whitespace & following, tails)
        begins = (whitespace & ~(whitespace << _ONE | whitespace_carry)) | last

        # Other classes: a run starts a pretoken, unless a space before it already does.
        runs = letters & ~(letters << _ONE | letter_carry) | digits & ~(digits << _ONE | digit_carry)
        other_runs = others & ~(others << _ONE | other_carry) & ~(spaces << _ONE | space_carry)
        begins |= runs & ~(spaces << _ONE | space_carry) | other_runs

        begins = (begins & ~removed_next) | added_next
        removed_next = added_next = np.uint64(0)
        apostrophes = in_range(buffer, block, 0, _APOSTROPHE, _APOSTROPHE) & other_runs
        while apostrophes:
            k = first_bit(apostrophes)
            apostrophes &= apostrophes - _ONE
            length = contraction_length(buffer, block + k, end)
            if length:
                if k + 1 < size:
                    begins &= ~(_ONE << np.uint64(k + 1))
                else:
                    removed_next |= _ONE << np.uint64(k + 1 - size)
                if block + k + length < end:
                    if k + length < size:
                        begins |= _ONE << np.uint64(k + length)
                    else:
                        added_next |= _ONE << np.uint64(k + length - size)

        count = write_starts(begins, block, starts, count)
        top = np.uint64(size - 1)
        letter_carry, digit_carry, other_carry = letters >> top, digits >> top, others >> top
        space_carry, whitespace_carry = spaces >> top, whitespace >> top
        block += size
    return count
