"""Byte ranges of lines: their ends, their characters, and how C4 looks at the end of a line."""

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import class_at, low_bits
from lm.kernels.curation.text_classes import WHITESPACE
from lm.kernels.jit import Bytes, Int, helper, inlined
from lm.kernels.simd import bit_count, first_bit, in_range, read

_LINE_FEED, _OPENING, _CLOSING = 0x0A, 0x5B, 0x5D
_CITATIONS = np.frombuffer(b"[edit][citation needed]", np.uint8)
_EDIT_BYTES = 6


@helper
def find_line_end(data: Bytes, begin: Int, end: Int) -> Int:
    """Return the place of the first line feed of ``data[begin:end]``, or ``end``."""
    for block in range(begin, end, 64):
        found = in_range(data, block, 0, _LINE_FEED, _LINE_FEED)
        if found:
            return min(block + first_bit(found), end)
    return end


@helper
def count_characters(data: Bytes, begin: Int, end: Int) -> Int:
    """Return the number of characters of ``data[begin:end]``."""
    total = end - begin
    for block in range(begin, end, 64):
        total -= bit_count(in_range(data, block, 0, 0x80, 0xBF) & low_bits(min(end - block, 64)))
    return total


@helper
def content_end(data: Bytes, begin: Int, end: Int, classes: Bytes) -> Int:
    """Return the end of a line without white space and citations, such as ``[1]`` or ``[edit]``, at its end."""
    while end > begin:
        byte = np.int64(read(data, end - 1))
        if byte == _CLOSING:
            start = _citation_start(data, begin, end)
            if start == end:
                break
            end = start
            continue
        start = end - 1
        if byte < 0x80:
            character_class = np.int64(read(classes, byte))
        else:
            while start > begin and read(data, start) & 0xC0 == 0x80:
                start -= 1
            character_class = np.int64(class_at(data, start, end, classes))
        if character_class & WHITESPACE == 0:
            break
        end = start
    return end


@helper
def _citation_start(data: Bytes, begin: Int, end: Int) -> Int:
    """Return where the citation begins that ends at ``end`` with a bracket; ``end`` if there is none."""
    start = end - 2
    while start >= begin and 0x30 <= read(data, start) <= 0x39:
        start -= 1
    if start >= begin and read(data, start) == _OPENING:
        return start
    for first, stop in ((0, _EDIT_BYTES), (_EDIT_BYTES, len(_CITATIONS))):
        size = stop - first
        k = 0
        while k < size and end - size >= begin and read(data, end - size + k) == _CITATIONS[first + k]:
            k += 1
        if k == size:
            return end - size
    return end


@inlined
def has_end_mark(data: Bytes, begin: Int, end: Int) -> bool:
    """Return whether a line ends with ``. ? ! " '``, and not with an ellipsis."""
    if end == begin:
        return False
    last = read(data, end - 1)
    if last == 0x2E:
        return not (end - begin >= 3 and read(data, end - 2) == 0x2E and read(data, end - 3) == 0x2E)
    return last == 0x3F or last == 0x21 or last == 0x22 or last == 0x27
