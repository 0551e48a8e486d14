"""What scanners share: characters of UTF-8, masks with one bit for each byte of a block of 64, and whitespace.

All bytes of a character have its class. ``letters & ~(letters << 1)`` then marks the start of each run of letters; one
carry bit per class, that of the byte before, leads from block to block.
"""

import numpy as np

from lm.kernels.bpe.scanners.character_classes import (
    CJK,
    CONTROL,
    DIGIT,
    LETTER,
    LOWER,
    MARK,
    OTHER,
    UNCASED,
    UPPER,
    WHITESPACE,
)
from lm.kernels.jit import ALL_BITS, INVALID_UTF8, ONE, Bytes, Int, Int32s, Word, helper, inlined
from lm.kernels.simd import CAN_COMPRESS_BYTES, bit_count, first_bit, in_range, last_bit, read, store_places, write

STARTS_PADDING = 65  # more entries of ``starts`` than bytes: excess of the last block, and the end of the text
APOSTROPHE, SPACE = 0x27, 0x20
_LINE_FEED, _CARRIAGE_RETURN = 0x0A, 0x0D
_LONG_S, _LONG_S_TAIL = 0xC5, 0xBF  # the bytes of U+017F, which equals s if case does not matter


@inlined
def low_bits(n: int) -> Word:
    """Return a mask of the ``n`` lowest bits, 0 ≤ n ≤ 64."""
    return ALL_BITS >> np.uint64(64 - n) if n > 0 else np.uint64(0)


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
def contraction_length(buffer: Bytes, position: int, end: int, case_bit: int) -> int:
    """Return the length of the contraction (``'s``, ``'ll``, ...) at an apostrophe; 0 if there is no contraction.

    ``case_bit``: 0x20 if case does not matter, so that ``'LL`` is one too; else 0.
    """
    if position + 1 < end:
        a = read(buffer, position + 1) | case_bit
        if a == 0x73 or a == 0x64 or a == 0x6D or a == 0x74:  # s d m t
            return 2
        if position + 2 < end:
            if case_bit and read(buffer, position + 1) == _LONG_S and read(buffer, position + 2) == _LONG_S_TAIL:
                return 3
            b = read(buffer, position + 2) | case_bit
            if (a == 0x6C and b == 0x6C) or ((a == 0x76 or a == 0x72) and b == 0x65):  # ll ve re
                return 3
    return 0


@helper
def add_non_ascii(
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
    is a status below 0. ``tails`` marks the bytes of whitespace characters except each first byte. For four classes
    this is faster than :func:`classify_non_ascii`.
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
            tails |= bits & (bits << ONE)
    valid = low_bits(size)
    return size, letters & valid, digits & valid, whitespace & valid, tails & valid


@helper
def classify_non_ascii(
    buffer: Bytes, block: int, end: int, size: int, non_ascii: Word, classes: Bytes
) -> tuple[int, Word, Word, Word, Word, Word, Word, Word, Word]:
    """Classify the non-ASCII characters of the 64-byte block at ``block``.

    Returns (size, lower, digits, whitespace, upper, uncased, marks, controls, cjk). ``size`` shrinks if a character
    crosses the end of the block, or is a status below 0.
    """
    lower = digits = whitespace = upper = uncased = marks = controls = cjk = np.uint64(0)
    while non_ascii:
        k = first_bit(non_ascii)
        point, length = character_at(buffer, block + k, end)
        if length == 0:
            size = INVALID_UTF8 - (block + k)
            break
        if k + length > 64:
            size = k
            break
        bits = low_bits(length) << np.uint64(k)
        non_ascii &= ~bits
        character_class = np.int64(read(classes, point))
        if character_class & CJK:
            cjk |= bits
            character_class ^= CJK
        if character_class == LOWER:
            lower |= bits
        elif character_class == UNCASED:
            uncased |= bits
        elif character_class == UPPER:
            upper |= bits
        elif character_class == MARK:
            marks |= bits
        elif character_class == DIGIT:
            digits |= bits
        elif character_class == WHITESPACE:
            whitespace |= bits
        elif character_class == CONTROL:
            controls |= bits
    return size, lower, digits, whitespace, upper, uncased, marks, controls, cjk


@inlined
def whole_characters(first: Word, mask: Word, continuation: Word) -> Word:
    """Return the bits ``first`` of first bytes with those of all bytes of their characters, which are in ``mask``."""
    if mask & continuation:
        for _ in range(3):
            first |= (first << ONE) & continuation
    return first


@inlined
def move_to_first_bytes(bits: Word, continuation: Word) -> Word:
    """Move the bits of last bytes of characters to their first bytes; ``continuation`` marks all other bytes."""
    while bits & continuation:
        bits = (bits & ~continuation) | ((bits & continuation) >> ONE)
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
            begins &= begins - ONE
            count += 1
    return total


@helper
def find_groups(digits: Word, digit_carry: Word, continuation: Word, count: int, max_digits: int) -> tuple[Word, int]:
    """Return a mask of the first digits of groups of at most ``max_digits``, and the digits of the last group.

    ``count`` is the digits of the last group before.
    """
    runs = digits & ~(digits << ONE | digit_carry)
    leads = digits & ~continuation
    groups = np.uint64(0)
    while leads:
        bit = leads & (~leads + ONE)
        leads &= leads - ONE
        if bit & runs or count == max_digits:
            count = 0
        if count == 0:
            groups |= bit
        count += 1
    return groups, count


@inlined
def is_line_break(byte: Int) -> bool:
    """Return whether a byte is a line feed or a carriage return."""
    return byte == _LINE_FEED or byte == _CARRIAGE_RETURN  # numba compiles ``in`` as more functions


@inlined
def find_line_breaks(buffer: Bytes, block: int) -> Word:
    """Return a mask of the line feeds and carriage returns of the 64 bytes at ``block``."""
    line_feeds = in_range(buffer, block, 0, _LINE_FEED, _LINE_FEED)
    return line_feeds | in_range(buffer, block, 0, _CARRIAGE_RETURN, _CARRIAGE_RETURN)


@inlined
def is_inner_whitespace(buffer: Bytes, begin: int, position: int, end: int, classes: Bytes) -> bool:
    """Return whether whitespace is at ``position`` after whitespace. A line break after it would join them."""
    is_whitespace = class_at(buffer, position, end, classes) == WHITESPACE
    return is_whitespace and class_before(buffer, begin, position, classes) == WHITESPACE


@inlined
def size_without_last_whitespace(whitespace: Word, block: int, size: int, end: int) -> int:
    """Return the size of a block without its last run of whitespace if that may go on after it; 0: all is whitespace.

    A line break decides how the whole run of whitespace around it is divided.
    """
    if block + size < end and whitespace >> np.uint64(size - 1) & ONE:
        text = low_bits(size) & ~whitespace
        return last_bit(text) + 1 if text else 0
    return size


@inlined
def divide_whitespace(
    whitespace: Word, line_breaks: Word, followers: Word, continuation: Word
) -> tuple[Word, Word, Word]:
    """Divide each run of whitespace. It starts a pretoken; so does the rest after its last line break, and the last
    character of the rest if one of ``followers`` comes after it.

    Returns (blanks: whitespace that is no line break, starts of runs and of last characters, starts of rests).
    """
    blanks = whitespace & ~line_breaks
    rests = blanks & (line_breaks << ONE)
    if rests:  # those without a line break at or after them in the same run
        before = line_breaks
        run = whitespace
        shift = ONE
        while shift < np.uint64(64):
            before |= run & (before >> shift)
            run &= run >> shift
            shift += shift
        rests &= ~before
    last = move_to_first_bytes(blanks & (followers >> ONE), continuation)
    return blanks, whitespace & ~(whitespace << ONE) | last, rests


@helper
def find_starts_of_whitespace(
    buffer: Bytes,
    position: int,
    end: int,
    classes: Bytes,
    joins_last_whitespace: bool,
    follows_other: bool,
    undivided: int,
    starts: Int32s,
    count: int,
) -> tuple[int, int, Word, Word]:
    """Write the starts of the pretokens of a run of whitespace at ``position``, character by character.

    ``follows_other``: a character before it takes its first line breaks. ``undivided``: bit c is set if whitespace
    before a character of class c stays whole. Returns (number of starts or a status below 0, end of the run, 1 if its
    last character is no line break, 1 if it is a space).
    """
    if follows_other:
        while position < end and is_line_break(read(buffer, position)):
            position += 1
    first = rest = last = position
    is_whole = False
    while position < end:
        point, length = character_at(buffer, position, end)
        if length == 0:
            return INVALID_UTF8 - position, position, np.uint64(0), np.uint64(0)
        character_class = np.int64(read(classes, point))
        if character_class != WHITESPACE:
            is_whole = undivided >> character_class & 1 != 0
            break
        last = position
        position += length
        if is_line_break(point):
            rest = position
    is_joined = joins_last_whitespace and position == end
    if first < position:
        write(starts, count, np.int32(first))
        count += 1
        if first < rest < position and not is_joined:
            write(starts, count, np.int32(rest))
            count += 1
        if last > rest and position < end and not is_whole:
            write(starts, count, np.int32(last))
            count += 1
    has_prefix = rest < position
    is_space = has_prefix and read(buffer, position - 1) == SPACE
    return count, position, np.uint64(has_prefix), np.uint64(is_space)
