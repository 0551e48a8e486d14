"""128-bit digests of documents, lines and paragraphs.

The hash is fast and fixed: equal digests by accident are out of the question, by an attacker's design they are not. The
plain form is in the tests: Python's integers.
"""

import numpy as np

from lm.kernels.curation.line_ends import find_line_end
from lm.kernels.jit import ALL_BITS, Bytes, Int, Int64s, UInt64s, Word, inlined, kernel
from lm.kernels.simd import fold_product, load64, read, write

HIGH_SEED, HIGH_MULTIPLIER = 0x9E3779B97F4A7C15, 0xE7037ED1A0B428DB
LOW_SEED, LOW_MULTIPLIER = 0xBF58476D1CE4E5B9, 0x8EBC6AF09C88C6E3
_HIGH_SEED, _HIGH_MULTIPLIER, _LOW_SEED, _LOW_MULTIPLIER = map(
    np.uint64, (HIGH_SEED, HIGH_MULTIPLIER, LOW_SEED, LOW_MULTIPLIER)
)
_LINE_FEED = 0x0A


@inlined
def _digest(data: Bytes, begin: Int, end: Int) -> tuple[Word, Word]:
    """Return both halves of the digest of ``data[begin:end]``: two hashes of its words of eight bytes."""
    length = np.uint64(end - begin)
    high, low = _HIGH_SEED ^ length, _LOW_SEED + length
    while end - begin >= 8:
        word = load64(data, begin)
        high = fold_product(high ^ word, _HIGH_MULTIPLIER)
        low = fold_product(low ^ word, _LOW_MULTIPLIER)
        begin += 8
    if begin < end:
        word = load64(data, begin) & (ALL_BITS >> np.uint64(64 - 8 * (end - begin)))
        high = fold_product(high ^ word, _HIGH_MULTIPLIER)
        low = fold_product(low ^ word, _LOW_MULTIPLIER)
    return fold_product(high, _LOW_MULTIPLIER), fold_product(low, _HIGH_MULTIPLIER)


@kernel
def digest_spans(data: Bytes, begins: Int64s, ends: Int64s, is_stripped: bool, highs: UInt64s, lows: UInt64s) -> None:
    """Write the digest of each span ``data[begins[i]:ends[i]]``; ``is_stripped``: without ASCII white space around."""
    for i in range(len(begins)):
        begin, end = np.int64(read(begins, i)), np.int64(read(ends, i))
        if is_stripped:
            while begin < end and _is_space(data, begin):
                begin += 1
            while begin < end and _is_space(data, end - 1):
                end -= 1
        high, low = _digest(data, begin, end)
        write(highs, i, high)
        write(lows, i, low)


@inlined
def _is_space(data: Bytes, position: Int) -> bool:
    byte = read(data, position)
    return byte == 0x20 or 0x09 <= byte <= 0x0D


@kernel
def split_lines(data: Bytes, offsets: Int64s, is_paragraph: bool, lines: Int64s, document_ends: Int64s) -> Int:
    """Find the lines or paragraphs of D documents; return their number L.

    ``lines`` (3, at least L): where each one begins and ends, and where the next one begins. Line feeds are between the
    end and the next begin: one after a line, two or more after a paragraph. Those before the first paragraph are before
    its begin. ``document_ends`` (D,): number of lines up to the end of each document.
    """
    size = lines.shape[1]
    count = np.int64(0)
    for document in range(len(offsets) - 1):
        position, end = np.int64(read(offsets, document)), np.int64(read(offsets, document + 1))
        while position < end:
            begin = position
            if is_paragraph:
                while begin < end and read(data, begin) == _LINE_FEED:
                    begin += 1
            stop = find_line_end(data, begin, end)
            while is_paragraph and stop + 1 < end and read(data, stop + 1) != _LINE_FEED:
                stop = find_line_end(data, stop + 1, end)
            position = min(stop + 1, end)
            if is_paragraph:
                while position < end and read(data, position) == _LINE_FEED:
                    position += 1
            write(lines, count, begin)
            write(lines, size + count, stop)
            write(lines, 2 * size + count, position)
            count += 1
        write(document_ends, document, count)
    return count
