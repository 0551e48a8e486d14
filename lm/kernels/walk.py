"""Going through a buffer: special tokens and, between them, pretokens, as many as are certain.

A text may come in buffers. Where more may follow, the last pretoken is uncertain and waits for the rest; the
references are :func:`lm.pretokens.split_special` and :func:`lm.pretokens.pretokenize` on the whole text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.kernels import Bytes, Ints, Longs, inlined, kernel
from lm.kernels.scan import scan
from lm.kernels.simd import first_bit, in_range

AT, SPECIAL_AT, SPECIAL_END, SPECIAL, PIECE = range(5)  # of a cursor: where to go on; the next special token, if known
SCANNED = 1 << 14  # bytes scanned at once, so that their starts stay in the processor's cache
TOO_SMALL = -1  # a pretoken longer than ``starts``
NONE, MORE = -1, -2  # instead of a special token: none here; none here, and the rest of the buffer is uncertain
_UNCERTAIN = 3  # bytes: a contraction's end, which decides where the pretokens of its letters begin
_ONE = np.uint64(1)


class Specials(NamedTuple):
    """Special tokens for the kernels, the longest first."""

    data: npt.NDArray[np.uint8]  # their bytes, one after the other
    ends: npt.NDArray[np.int64]  # (number + 1,): where each ends; the first entry is 0
    ids: npt.NDArray[np.int64]  # (number,)
    heads: npt.NDArray[np.int64]  # (different, 2): their first two bytes; -1 where there is no second


def pack_specials(tokens: Sequence[tuple[bytes, int]]) -> Specials:
    """Special tokens, each (bytes, id), as arrays."""
    ordered = sorted(tokens, key=lambda token: len(token[0]), reverse=True)
    heads = sorted({(token[0], token[1] if len(token) > 1 else -1) for token, _ in ordered})
    return Specials(
        np.frombuffer(b"".join(token for token, _ in ordered) or b"\0", np.uint8).copy(),
        np.cumsum([0, *(len(token) for token, _ in ordered)]).astype(np.int64),
        np.array([token_id for _, token_id in ordered], np.int64),
        np.array(heads, np.int64).reshape(-1, 2),
    )


@inlined
def starts_with(buffer: Bytes, at: int, end: int, token: Bytes, length: int) -> int:
    """How many bytes of ``token[:length]`` stand at ``at``, before ``end``."""
    k = 0
    while k < length and at + k < end and buffer[at + k] == token[k]:
        k += 1
    return k


@kernel
def find_special(buffer: Bytes, begin: int, end: int, specials: Specials) -> tuple[int, int, int]:
    """(position, its end, which) of the leftmost special token in ``buffer[begin:end]``, the longest there; which is
    NONE where there is none, and the position then that of the longest beginning of one at the buffer's end."""
    if len(specials.ids) == 0:
        return end, end, NONE
    at = begin
    while at < end:
        found = np.uint64(0)
        for i in range(len(specials.heads)):
            first, second = specials.heads[i]
            here = in_range(buffer, at, 0, first, first)
            if second >= 0 and at + 64 < end:  # a special token at the very end is looked for by its first byte
                here &= in_range(buffer, at + 1, 0, second, second)
            found |= here
        while found:
            place = at + first_bit(found)
            found &= found - _ONE
            if place >= end:
                break
            for i in range(len(specials.ids)):
                token = specials.data[specials.ends[i] : specials.ends[i + 1]]
                matched = starts_with(buffer, place, end, token, len(token))
                if matched == len(token):
                    return place, place + matched, i
        at += 64
    return end, end, NONE


@kernel
def open_special(buffer: Bytes, begin: int, end: int, specials: Specials) -> int:
    """Where a special token may have begun that ends past ``end``: the leftmost such place, or ``end``."""
    if len(specials.ids) == 0:
        return end
    for place in range(max(begin, end - specials.ends[1] + 1), end):
        for i in range(len(specials.ids)):
            token = specials.data[specials.ends[i] : specials.ends[i + 1]]
            matched = starts_with(buffer, place, end, token, len(token))
            if place + matched == end and matched < len(token):
                return place
    return end


@inlined
def character_end(buffer: Bytes, begin: int, end: int) -> int:
    """``end``, less the bytes of a character that may go on past it."""
    for back in range(1, min(3, end - begin) + 1):
        byte = buffer[end - back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end - back if length > back else end
        if byte < 0x80:
            return end
    return end


@kernel
def next_pretokens(
    buffer: Bytes, cursor: Longs, end: int, final: bool, classes: Bytes, specials: Specials, starts: Ints
) -> tuple[int, int]:
    """Find the next pretokens from ``cursor[AT]`` on and move it past them, and past a special token after them.

    Pretoken i of the n found is ``buffer[starts[i]:starts[i + 1]]``. Returns (n, which): ``which`` is the index of the
    special token after them, or NONE; with MORE nothing else can be told before the text goes on (``final``: it does
    not). n is TOO_SMALL where ``starts`` must grow, and below that -2 - i where byte i is not UTF-8.
    """
    at = cursor[AT]
    if cursor[SPECIAL_AT] < at:
        cursor[SPECIAL_AT], cursor[SPECIAL_END], cursor[SPECIAL] = find_special(buffer, at, end, specials)
    which = cursor[SPECIAL]
    stop = cursor[SPECIAL_AT]
    closed = which != NONE or final  # whether the text before ``stop`` is known to end there
    if not final:
        open_at = open_special(buffer, at, end, specials)
        if open_at <= stop:  # a special token that may go on comes first, or is longer
            which, closed = NONE, False
            stop = character_end(buffer, at, open_at)
    shortened = stop - at > cursor[PIECE]
    if min(cursor[PIECE], stop - at) > len(starts) - 65:
        return TOO_SMALL, NONE
    if shortened:
        stop = character_end(buffer, at, at + cursor[PIECE])
    n = scan(buffer, at, stop, classes, starts)
    if n < 0:
        return n - 1, NONE
    starts[n] = stop
    if closed and not shortened:
        cursor[AT], cursor[PIECE] = cursor[SPECIAL_END] if which != NONE else stop, SCANNED
        if which != NONE:
            return n, which
        return n, MORE
    while n > 0 and starts[n] > stop - _UNCERTAIN:
        n -= 1
    if n > 0:
        cursor[PIECE] = SCANNED
    elif shortened:  # of a longer pretoken more is looked at
        cursor[PIECE] *= 4
    cursor[AT] = starts[n]
    return n, NONE if shortened else MORE
