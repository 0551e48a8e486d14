"""Text in buffers for the kernels: blocks of bytes laid one after the other, what is uncertain kept for the next."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from lm.errors import NotUtf8
from lm.kernels.walk import AT, SCANNED, SPECIAL_AT

WINDOW = 1 << 19  # bytes that a kernel is given at a time: they stay in the processor's cache
PADDING = 128  # bytes past the end that a kernel may read
_SPARE = 32  # times the memory wanted, so that a buffer is moved rarely: memory is taken only as it is filled
_BASE = 5  # of a cursor, after the kernels' entries: bytes of text before the buffer

Cursor = npt.NDArray[np.int64]


def new_cursor() -> Cursor:
    """A cursor for :func:`windows`."""
    return np.array([0, -1, -1, -1, SCANNED, 0], np.int64)


def windows(
    blocks: Iterable[bytes], cursor: Cursor, size: int = WINDOW
) -> Iterator[tuple[npt.NDArray[np.uint8], int, bool]]:
    """Yield (buffer, end, final) over the text that ``blocks`` join to: the bytes before ``end`` are to be worked on.

    The caller moves ``cursor[AT]`` to where it came; what it left comes again with more text after it. ``final`` is
    True for the last window. A window grows past ``size`` while nothing in it is certain.
    """
    buffer = np.empty(size + PADDING, np.uint8)
    end, limit = 0, size
    cursor[AT], cursor[SPECIAL_AT], cursor[_BASE] = 0, -1, 0
    for block in blocks:
        piece = memoryview(block)
        while piece:
            if end == limit:
                yield buffer, end, False
                rest = buffer[cursor[AT] : end]
                limit = max(size, 4 * len(rest))  # so that a long pretoken is not looked at again and again
                outgrown = limit + PADDING > len(buffer)
                if outgrown:
                    buffer = np.empty(_SPARE * limit + PADDING, np.uint8)
                if outgrown or cursor[AT] > 0:
                    buffer[: len(rest)] = rest
                end = len(rest)
                cursor[_BASE] += cursor[AT]
                cursor[AT], cursor[SPECIAL_AT] = 0, -1
            taken = min(len(piece), limit - end)
            buffer[end : end + taken] = np.frombuffer(piece[:taken], np.uint8)
            end += taken
            piece = piece[taken:]
    yield buffer, end, True


def not_utf8(buffer: npt.NDArray[np.uint8], cursor: Cursor, at: int) -> NotUtf8:
    """The error for byte ``at`` of a window."""
    return NotUtf8(int(buffer[at]), int(cursor[_BASE]) + at)
