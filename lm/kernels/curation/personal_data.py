"""Places of e-mail addresses, telephone numbers of the USA and IPv4 addresses in documents.

Each is found from a byte that it must have: an e-mail address from its @, the others from the begin of a number, a plus
sign or a parenthesis. :mod:`lm.curate.masks` has the same as regular expressions, which the tests compare.
"""

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import low_bits
from lm.kernels.jit import ONE, Bytes, Int, Int64s, helper, inlined, kernel
from lm.kernels.simd import first_bit, in_range, read, write

EMAIL, PHONE, IP = range(3)
MIN_BYTES = 6  # of what is found
_AT, _DOT, _HYPHEN, _UNDERSCORE, _PERCENT, _PLUS = 0x40, 0x2E, 0x2D, 0x5F, 0x25, 0x2B
_COMMA, _SLASH, _SPACE, _OPENING, _CLOSING, _ZERO, _ONE, _TWO = 0x2C, 0x2F, 0x20, 0x28, 0x29, 0x30, 0x31, 0x32
_MAX_OCTET_DIGITS, _MAX_OCTET = 3, 255
NOT_FOUND = -1


@inlined
def _is_digit(byte: Int) -> bool:
    return bool(0x30 <= byte <= 0x39)


@inlined
def _is_letter(byte: Int) -> bool:
    return bool(0x61 <= byte | 0x20 <= 0x7A)


@inlined
def _is_alphanumeric(byte: Int) -> bool:
    return _is_digit(byte) or _is_letter(byte)


@inlined
def _is_word(byte: Int) -> bool:
    return _is_alphanumeric(byte) or byte == _UNDERSCORE


@inlined
def _is_separator(byte: Int) -> bool:
    return bool(byte in (_HYPHEN, _DOT, _SPACE))


@helper
def _find_email(data: Bytes, begin: Int, at: Int, end: Int) -> tuple[Int, Int]:
    """Return the range of the address around the @ at ``at``; NOT_FOUND as its begin if there is none."""
    start = at
    while start > begin:
        byte = np.int64(read(data, start - 1))
        if byte == _DOT:  # only between two other characters
            before = np.int64(read(data, start - 2)) if start - 1 > begin else np.int64(0)
            is_before = _is_word(before) or before in (_PERCENT, _PLUS, _HYPHEN)
            if start == at or not is_before:
                break
        elif not (_is_word(byte) or byte in (_PERCENT, _PLUS, _HYPHEN)):
            break
        start -= 1
    found: Int = np.int64(NOT_FOUND)
    if start == at:
        return found, at
    label, labels = at + 1, 0
    while label < end and _is_alphanumeric(read(data, label)):
        letters = label
        while letters < end and _is_letter(read(data, letters)):
            letters += 1
        if labels and letters - label >= 2 and not (letters < end and _is_digit(read(data, letters))):
            found = letters  # it may be the last label
        stop = letters
        while stop < end and (_is_alphanumeric(read(data, stop)) or read(data, stop) == _HYPHEN):
            stop += 1
        if stop >= end or read(data, stop) != _DOT or read(data, stop - 1) == _HYPHEN:
            break
        label = stop + 1
        labels += 1
    return (found, found) if found < 0 else (start, found)


@helper
def _skip_digits(data: Bytes, start: Int, count: int, end: Int) -> Int:
    """Return the place after ``count`` digits at ``start``, or NOT_FOUND; ``start`` may be NOT_FOUND."""
    if start < 0 or start + count > end:
        return np.int64(NOT_FOUND)
    for k in range(count):
        if not _is_digit(read(data, start + k)):
            return np.int64(NOT_FOUND)
    return start + count


@inlined
def _skip_separator(data: Bytes, start: Int, end: Int) -> Int:
    return start + 1 if 0 <= start < end and _is_separator(read(data, start)) else start


@inlined
def _may_begin_number(data: Bytes, begin: Int, start: Int) -> bool:
    """Return whether a number at ``start`` is not the rest of a word or of a longer number."""
    if start == begin:
        return True
    byte = np.int64(read(data, start - 1))
    if _is_word(byte):
        return False
    is_joint = byte in (_DOT, _COMMA, _HYPHEN, _SLASH)
    return not (is_joint and start - 1 > begin and _is_digit(read(data, start - 2)))


@inlined
def _may_end_number(data: Bytes, stop: Int, end: Int) -> bool:
    """Return whether a number up to ``stop`` is not the begin of a word or of a longer number."""
    if stop == end:
        return True
    byte = np.int64(read(data, stop))
    if _is_word(byte):
        return False
    is_joint = byte in (_DOT, _COMMA, _HYPHEN, _SLASH)
    return not (is_joint and stop + 1 < end and _is_digit(read(data, stop + 1)))


@helper
def _phone_end(data: Bytes, begin: Int, start: Int, end: Int) -> Int:
    """Return the end of the telephone number at ``start``, or NOT_FOUND."""
    byte, position = np.int64(read(data, start)), start
    if _is_digit(byte) and not _may_begin_number(data, begin, start):
        return np.int64(NOT_FOUND)
    if byte == _PLUS:
        position += 1
        byte = np.int64(read(data, position)) if position < end else np.int64(0)
        if byte != _ONE:
            return np.int64(NOT_FOUND)
    if byte == _ONE:
        position = _skip_separator(data, position + 1, end)
        byte = np.int64(read(data, position)) if position < end else np.int64(0)
    is_opened = byte == _OPENING
    if is_opened:
        position += 1
    if position >= end or read(data, position) < _TWO:  # no area code begins with 0 or 1
        return np.int64(NOT_FOUND)
    position = _skip_digits(data, position, 3, end)
    if is_opened and position >= 0:
        position = position + 1 if position < end and read(data, position) == _CLOSING else np.int64(NOT_FOUND)
    position = _skip_digits(data, _skip_separator(data, position, end), 3, end)
    position = _skip_digits(data, _skip_separator(data, position, end), 4, end)
    return position if position >= 0 and _may_end_number(data, position, end) else np.int64(NOT_FOUND)


@helper
def _ip_end(data: Bytes, begin: Int, start: Int, end: Int) -> Int:
    """Return the end of the IPv4 address at ``start``, or NOT_FOUND."""
    if not _may_begin_number(data, begin, start):
        return np.int64(NOT_FOUND)
    position = start
    for octet in range(4):
        if octet:
            if position >= end or read(data, position) != _DOT:
                return np.int64(NOT_FOUND)
            position += 1
        first, value = position, np.int64(0)
        while position < end and position - first <= _MAX_OCTET_DIGITS and _is_digit(read(data, position)):
            value = 10 * value + np.int64(read(data, position)) - _ZERO
            position += 1
        if position == first or position - first > _MAX_OCTET_DIGITS or value > _MAX_OCTET:
            return np.int64(NOT_FOUND)
    return position if _may_end_number(data, position, end) else np.int64(NOT_FOUND)


@inlined
def _candidates(data: Bytes, block: Int, kind: int, digit_before: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return a mask of the bytes of a block from which to look, and 1 if its last byte is a digit."""
    if kind == EMAIL:
        return in_range(data, block, 0, _AT, _AT), digit_before
    digits = in_range(data, block, 0, 0x30, 0x39)
    found = digits & ~(digits << ONE | digit_before)
    if kind == PHONE:
        found |= in_range(data, block, 0, _PLUS, _PLUS) | in_range(data, block, 0, _OPENING, _OPENING)
    return found, digits >> np.uint64(63)


@kernel
def find_personal_data(data: Bytes, offsets: Int64s, kind: int, begins: Int64s, ends: Int64s, counts: Int64s) -> int:
    """Write the ranges of e-mail addresses, telephone numbers or IP addresses in D documents, and their number.

    ``kind``: EMAIL, PHONE or IP. ``data`` is UTF-8 with 64 bytes of padding, ``offsets`` (D + 1,), ``begins`` and
    ``ends`` (bytes // MIN_BYTES + 1,), ``counts`` (D,): of each document. Returns the number of ranges.
    """
    total = 0
    for row in range(len(offsets) - 1):
        begin, end, first = read(offsets, row), read(offsets, row + 1), total
        free = begin  # the end of the last range
        digit_before = np.uint64(0)
        for block in range(begin, end, 64):
            found, digit_before = _candidates(data, block, kind, digit_before)
            found &= low_bits(min(end - block, 64))
            while found:
                place = block + first_bit(found)
                found &= found - ONE
                if place < free:
                    continue
                start, stop = place, np.int64(NOT_FOUND)
                if kind == EMAIL:
                    start, stop = _find_email(data, free, place, end)
                elif kind == PHONE:
                    stop = _phone_end(data, begin, place, end)
                else:
                    stop = _ip_end(data, begin, place, end)
                if start >= 0 and stop >= 0:
                    write(begins, total, start)
                    write(ends, total, stop)
                    free = stop
                    total += 1
        write(counts, row, np.int64(total - first))
    return total
