"""Where the pretokens of GPT-2's pattern begin: 64 bytes at a time, by masks with one bit a byte.

The reference is the ``regex`` pattern in :mod:`lm.pretokens`. Each byte belongs to one class: letter, digit, white
space or other; the bytes of a character share its class. With these as 64-bit masks, "begins a run of letters" is
``letters & ~(letters << 1)``, and a carry of one bit a class goes from block to block.
"""

import numpy as np

from lm.kernels import Bytes, Int, Ints, Word, inlined, kernel
from lm.kernels.classes import DIGIT, LETTER, OTHER, WHITE
from lm.kernels.simd import bit_count, first_bit, in_range, write

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_APOSTROPHE, _SPACE = 0x27, 0x20


@inlined
def low_bits(n: int) -> Word:
    """A mask of the ``n`` lowest bits, 0 to 64."""
    return _ALL >> np.uint64(64 - n) if n > 0 else np.uint64(0)


@inlined
def decode(buffer: Bytes, at: int, end: int) -> tuple[Int, Int]:
    """(code point, length in bytes) of the UTF-8 character at ``at``; length 0 where the bytes before ``end`` are
    none. Surrogates, overlong forms and what lies past U+10FFFF are no characters."""
    first = np.int64(buffer[at])
    if first < 0x80:
        return first, 1
    if first < 0xC2 or first > 0xF4:
        return 0, 0
    length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if at + length > end:
        return 0, 0
    point = first & (0x7F >> length)
    for k in range(1, length):
        byte = np.int64(buffer[at + k])
        if byte & 0xC0 != 0x80:
            return 0, 0
        point = point << 6 | byte & 0x3F
    if (length == 3 and (point < 0x800 or 0xD800 <= point <= 0xDFFF)) or (
        length == 4 and (point < 0x10000 or point > 0x10FFFF)
    ):
        return 0, 0
    return point, length


@inlined
def class_at(buffer: Bytes, at: int, end: int, classes: Bytes) -> Int:
    """The class of the character at ``at``; OTHER where there is none."""
    point, length = decode(buffer, at, end)
    return np.int64(classes[point]) if length else OTHER


@inlined
def contraction(buffer: Bytes, at: int, end: int) -> int:
    """The length of the contraction (``'s``, ``'ll``, ...) that begins at the apostrophe at ``at``; 0 for none."""
    if at + 1 < end:
        a = buffer[at + 1]
        if a == 0x73 or a == 0x64 or a == 0x6D or a == 0x74:  # s d m t
            return 2
        if at + 2 < end:
            b = buffer[at + 2]
            if (a == 0x6C and b == 0x6C) or ((a == 0x76 or a == 0x72) and b == 0x65):  # ll ve re
                return 3
    return 0


@kernel
def classify(
    buffer: Bytes, at: int, end: int, size: int, high: Word, letters: Word, digits: Word, white: Word, classes: Bytes
) -> tuple[int, Word, Word, Word, Word]:
    """Put the characters past ASCII of a block into its masks.

    Returns (size, letters, digits, white, tails): the block ends before a character that crosses its end; ``tails``
    are the bytes of white space past each character's first. A size of -1 - k: byte k of the block is not UTF-8.
    """
    tails = np.uint64(0)
    while high:
        k = first_bit(high)
        point, length = decode(buffer, at + k, end)
        if length == 0:
            return -1 - k, letters, digits, white, tails
        if k + length > 64:
            size = k
            break
        bits = low_bits(length) << np.uint64(k)
        high &= ~bits
        kind = classes[point]
        if kind == LETTER:
            letters |= bits
        elif kind == DIGIT:
            digits |= bits
        elif kind == WHITE:
            white |= bits
            tails |= bits & (bits << _ONE)
    keep = low_bits(size)
    return size, letters & keep, digits & keep, white & keep, tails & keep


@kernel
def scan(buffer: Bytes, begin: int, end: int, classes: Bytes, starts: Ints) -> int:
    """Write where the pretokens of the text ``buffer[begin:end]`` begin to ``starts`` (int32, room for one a byte and
    64 more). Returns how many there are, or -1 - i where byte i of the buffer is not UTF-8.

    ``classes`` (uint8, 0x110000): the class of each code point.
    """
    count = 0
    letter = digit = other = space = blank = np.uint64(0)  # whether the byte before the block is of the class
    cleared = added = np.uint64(0)  # starts that a contraction in the block before takes away and gives
    at = begin
    while at < end:
        size = min(64, end - at)
        valid = low_bits(size)
        letters = in_range(buffer, at, 0x20, 0x61, 0x7A) & valid
        digits = in_range(buffer, at, 0, 0x30, 0x39) & valid
        spaces = in_range(buffer, at, 0, _SPACE, _SPACE) & valid
        white = spaces | (in_range(buffer, at, 0, 0x09, 0x0D) & valid)
        high = in_range(buffer, at, 0, 0x80, 0xFF) & valid
        tails = np.uint64(0)
        if high:
            size, letters, digits, white, tails = classify(buffer, at, end, size, high, letters, digits, white, classes)
            if size < 0:
                return size - at
            valid = low_bits(size)
            spaces &= valid
        others = valid & ~(letters | digits | white)

        # White space: a run begins a pretoken, and so does its last character where something follows.
        following = (valid & ~white) >> _ONE
        if at + size < end:
            after = np.int64(buffer[at + size])
            kind = np.int64(classes[after]) if after < 0x80 else class_at(buffer, at + size, end, classes)
            following |= np.uint64(kind != WHITE) << np.uint64(size - 1)
        last = white & following
        if last & tails:
            moved = (last & tails) >> _ONE
            last = (last & ~tails) | (moved & ~tails) | ((moved & tails) >> _ONE)
        begins = (white & ~(white << _ONE | blank)) | last

        # The others: where the class changes, but not after the space that they take with them.
        runs = letters & ~(letters << _ONE | letter) | digits & ~(digits << _ONE | digit)
        other_runs = others & ~(others << _ONE | other) & ~(spaces << _ONE | space)
        begins |= runs & ~(spaces << _ONE | space) | other_runs

        begins = (begins & ~cleared) | added
        cleared = added = np.uint64(0)
        quotes = in_range(buffer, at, 0, _APOSTROPHE, _APOSTROPHE) & other_runs
        while quotes:
            k = first_bit(quotes)
            quotes &= quotes - _ONE
            length = contraction(buffer, at + k, end)
            if length:
                if k + 1 < size:
                    begins &= ~(_ONE << np.uint64(k + 1))
                else:
                    cleared |= _ONE << np.uint64(k + 1 - size)
                if at + k + length < end:
                    if k + length < size:
                        begins |= _ONE << np.uint64(k + length)
                    else:
                        added |= _ONE << np.uint64(k + length - size)

        number = bit_count(begins)
        k = 0
        while k < number:  # eight at a time, so that the processor can foretell the rounds; the rest is overwritten
            for _ in range(8):
                write(starts, count + k, np.int32(at + first_bit(begins)))
                begins &= begins - _ONE
                k += 1
        count += number
        top = np.uint64(size - 1)
        letter, digit, other = letters >> top, digits >> top, others >> top
        space, blank = spaces >> top, white >> top
        at += size
    return count
