"""Iteration over a buffer: special tokens and, between them, all pretokens that later text cannot change.

A text comes in buffers. If more text may follow, the last pretoken is uncertain and waits for it. The references are
:func:`lm.text.pretokenize.split_special_tokens` and :func:`lm.text.pretokenize.pretokenize` on the whole text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import STARTS_PADDING
from lm.kernels.bpe.scanners.registry import Rules, find_starts, may_join
from lm.kernels.jit import ONE, WORKSPACE_FULL, Bytes, Int, Int32s, Int64s, Record, Records, helper, inlined
from lm.kernels.simd import first_bit, in_range, load64, read

SCAN_BYTES = 1 << 14  # bytes scanned at once, so that their pretoken starts stay in the CPU's cache
NO_SPECIAL, NEEDS_MORE_TEXT = -1, -2  # in place of the index of a special token
_UNCERTAIN_BYTES = 3  # a contraction is up to 3 bytes; its end decides where the pretokens of its letters start

_CURSOR = np.dtype(
    [
        ("position", np.int64),  # where to continue in the buffer
        ("special_start", np.int64),  # the next special token; below ``position``: not known yet
        ("special_end", np.int64),
        ("special_index", np.int64),  # or NO_SPECIAL
        ("scan_bytes", np.int64),  # bytes to scan next
        ("buffer_offset", np.int64),  # bytes of text before the buffer
    ]
)
TEXT_START = (0, -1, -1, NO_SPECIAL, SCAN_BYTES, 0)  # the record of a cursor at the start of a text


def new_cursor() -> Records:
    """Return a cursor: an array of one record, which the kernels update."""
    return np.array([TEXT_START], _CURSOR)


class Specials(NamedTuple):
    """Special tokens for the kernels, longest first.

    The token at a place is found by binary search among all. If the last token that does not come after the text there
    is no beginning of the text, then only its own beginnings can be.
    """

    data: Bytes  # the bytes of all tokens, concatenated, and 8 more, as they are compared in words of 8
    ends: Int64s  # (tokens + 1,): offsets in ``data``; the first is 0
    ids: Int64s  # (tokens,)
    prefixes: Int64s  # (unique prefixes, 2): first two bytes; the second is -1 for one-byte tokens
    order: Int64s  # (tokens,): the tokens in the order of their bytes
    beginnings: Int64s  # (tokens,): the longest token that this one begins with, or NO_SPECIAL


def pack_specials(tokens: Sequence[tuple[bytes, int]]) -> Specials:
    """Pack special tokens, each (bytes, id), into arrays."""
    ordered = sorted(tokens, key=lambda token: len(token[0]), reverse=True)
    prefixes = sorted({(token[0], token[1] if len(token) > 1 else -1) for token, _ in ordered})
    index = {token: i for i, (token, _) in reversed([*enumerate(ordered)])}

    def beginning(token: bytes) -> int:
        return next((index[token[:n]] for n in range(len(token) - 1, 0, -1) if token[:n] in index), NO_SPECIAL)

    return Specials(
        np.frombuffer(b"".join(token for token, _ in ordered) + bytes(8), np.uint8).copy(),
        np.cumsum([0, *(len(token) for token, _ in ordered)]).astype(np.int64),
        np.array([token_id for _, token_id in ordered], np.int64),
        np.array(prefixes, np.int64).reshape(-1, 2),
        np.array([index[token] for token in sorted(index)], np.int64),
        np.array([beginning(token) for token, _ in ordered], np.int64),
    )


@inlined
def match_special(buffer: Bytes, position: Int, end: Int, specials: Specials, i: Int) -> tuple[Int, Int]:
    """Return (matched, length): how many bytes of special token ``i`` are at ``position``, before ``end``."""
    first = read(specials.ends, i)
    length = read(specials.ends, i + 1) - first
    limit = min(length, end - position)
    matched = np.int64(0)
    while matched < limit:
        difference = load64(buffer, position + matched) ^ load64(specials.data, first + matched)
        if difference:
            matched += first_bit(difference) >> 3
            break
        matched += 8
    matched = min(matched, limit)
    return matched, length


@inlined
def last_special(buffer: Bytes, start: int, end: int, specials: Specials) -> Int:
    """Return the last special token in byte order that does not come after ``buffer[start:end]``, or NO_SPECIAL."""
    first, stop = np.int64(0), np.int64(len(specials.order))
    while first < stop:
        middle = (first + stop) >> 1
        i = read(specials.order, middle)
        matched, length = match_special(buffer, start, end, specials, i)
        is_after = matched < length and (
            start + matched == end
            or read(buffer, start + matched) < read(specials.data, read(specials.ends, i) + matched)
        )
        if is_after:
            stop = middle
        else:
            first = middle + 1
    return read(specials.order, first - 1) if first > 0 else np.int64(NO_SPECIAL)


@helper
def find_special(buffer: Bytes, begin: int, end: int, specials: Specials) -> tuple[int, int, int]:
    """Return (start, end, index) of the leftmost special token in ``buffer[begin:end]``, the longest at its start.

    Returns (end, end, NO_SPECIAL) if there is none.
    """
    if len(specials.ids) == 0:
        return end, end, NO_SPECIAL
    block = begin
    while block < end:
        candidates = np.uint64(0)
        for i in range(len(specials.prefixes)):
            first, second = read(specials.prefixes, 2 * i), read(specials.prefixes, 2 * i + 1)
            matches = in_range(buffer, block, 0, first, first)
            if second >= 0 and block + 64 < end:  # the last block may end between the two bytes
                matches &= in_range(buffer, block + 1, 0, second, second)
            candidates |= matches
        while candidates:
            start = block + first_bit(candidates)
            candidates &= candidates - ONE
            if start >= end:
                break
            i = last_special(buffer, start, end, specials)
            while i >= 0:
                matched, length = match_special(buffer, start, end, specials, i)
                if matched == length:
                    return start, start + length, i
                i = read(specials.beginnings, i)
        block += 64
    return end, end, NO_SPECIAL


@helper
def find_partial_special(buffer: Bytes, begin: int, end: int, specials: Specials) -> int:
    """Return the leftmost position where a special token may start that ends after ``end``; ``end`` if none."""
    if len(specials.ids) == 0:
        return end
    start = end - read(specials.ends, 1) + 1
    start = begin if start < begin else start
    while start < end:
        for i in range(len(specials.ids)):
            matched, length = match_special(buffer, start, end, specials, i)
            if start + matched == end and matched < length:
                return start
        start += 1
    return end


@helper
def last_character_end(buffer: Bytes, begin: int, end: int) -> int:
    """Return ``end`` without the bytes of a character that is cut off at ``end``."""
    back = 1
    while back <= 3 and back <= end - begin:
        byte = read(buffer, end - back)
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end - back if length > back else end
        if byte < 0x80:
            return end
        back += 1
    return end


@helper
def next_pretokens(
    buffer: Bytes,
    cursor: Record,
    end: int,
    is_final: bool,
    classes: Bytes,
    rules: Rules,
    specials: Specials,
    starts: Int32s,
) -> tuple[int, int]:
    """Find the next pretokens and move the cursor after them, and after a special token that follows them.

    ``rules`` choose the scanner by their type; the code of the others is not compiled.

    Returns (n, index). Pretoken i of n is ``buffer[starts[i]:starts[i + 1]]``; n below 0 is a status. ``index`` is the
    special token after the pretokens, NO_SPECIAL, or NEEDS_MORE_TEXT if the rest of the buffer could change with the
    text that follows. ``is_final``: no text follows the buffer.
    """
    position = cursor.position
    if cursor.special_start < position:
        cursor.special_start, cursor.special_end, cursor.special_index = find_special(buffer, position, end, specials)
    special = cursor.special_index
    stop = cursor.special_start
    scan_bytes = cursor.scan_bytes
    is_stop_certain = special != NO_SPECIAL or is_final
    longest = read(specials.ends, 1) if len(specials.ids) else np.int64(1)
    if not is_final and stop > end - longest:  # else none that may end after the buffer begins before ``stop``
        partial_start = find_partial_special(buffer, position, end, specials)
        if partial_start <= stop:  # a longer or earlier special token may end after the buffer
            special, is_stop_certain = NO_SPECIAL, False
            stop = last_character_end(buffer, position, partial_start)
    is_shortened = stop - position > scan_bytes
    capacity = len(starts) - STARTS_PADDING
    if scan_bytes > capacity and stop - position > capacity:
        return WORKSPACE_FULL, NO_SPECIAL
    if is_shortened:
        stop = last_character_end(buffer, position, position + scan_bytes)
    n = find_starts(buffer, position, stop, classes, rules, starts)
    if n < 0:
        return n, NO_SPECIAL
    starts[n] = stop
    if is_stop_certain and not is_shortened:
        cursor.position = cursor.special_end if special != NO_SPECIAL else stop
        cursor.scan_bytes = SCAN_BYTES
        return n, special if special != NO_SPECIAL else NEEDS_MORE_TEXT
    while n > 0 and read(starts, n) > stop - _UNCERTAIN_BYTES:
        n -= 1
    while n > 0 and may_join(buffer, position, np.int64(read(starts, n)), stop, classes, rules):
        n -= 1
    if n > 0:
        cursor.scan_bytes = SCAN_BYTES
    elif is_shortened:  # one pretoken is longer than the scan
        cursor.scan_bytes = 4 * scan_bytes
    cursor.position = read(starts, n)
    return n, NO_SPECIAL if is_shortened else NEEDS_MORE_TEXT
