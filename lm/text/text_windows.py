"""Text windows: contiguous buffers of UTF-8 that a kernel reads at once, built from blocks of bytes."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from lm.common.errors import InvalidUtf8Error, UserError
from lm.kernels.bpe.pretokens import TEXT_START
from lm.kernels.jit import Records

WINDOW = 1 << 19  # bytes that a kernel reads per call: they fit into the CPU's cache
PADDING = 128  # bytes after the end that a kernel may read
_MAX_WINDOW_BYTES = 1 << 30  # the kernels' positions have 32 bits


def text_windows(
    blocks: Iterable[bytes | memoryview], cursor: Records, size: int = WINDOW
) -> Iterator[tuple[npt.NDArray[np.uint8], int, bool]]:
    """Yield (uint8 buffer, end, is_last) over the concatenated ``blocks``. ``buffer[:end]`` is the text to process.

    The caller moves the position of ``cursor`` to the end of the text that it processed. The next window begins there
    and has more text after it. A window grows past ``size`` if the caller could process none of it.
    """
    buffer = np.empty(size + PADDING, np.uint8)
    end, limit = 0, size
    cursor[0] = TEXT_START
    for block in blocks:
        piece = memoryview(block)
        while piece:
            if end == limit:
                yield buffer, end, False
                position = int(cursor[0]["position"])
                rest = buffer[position:end]
                # Growth bounds repeated scans of a long pretoken.
                limit = max(size, min(4 * len(rest), _MAX_WINDOW_BYTES))
                if len(rest) >= limit:
                    raise UserError(f"One pretoken is longer than {_MAX_WINDOW_BYTES >> 30} GB; break the text up.")
                outgrown = limit + PADDING > len(buffer)
                if outgrown:
                    # Much more than needed, so that text is rarely copied: pages that are not written cost no memory.
                    # Above 1 GiB only twice the text: a machine with little memory may refuse more.
                    buffer = np.empty(min(32 * limit, max(2 * limit, 1 << 30)) + PADDING, np.uint8)
                if outgrown or position > 0:
                    buffer[: len(rest)] = rest
                end = len(rest)
                cursor["buffer_offset"] += position
                cursor["position"], cursor["special_start"] = 0, -1
            taken = min(len(piece), limit - end)
            buffer[end : end + taken] = np.frombuffer(piece[:taken], np.uint8)
            end += taken
            piece = piece[taken:]
    yield buffer, end, True


def not_utf8(buffer: npt.NDArray[np.uint8], cursor: Records, at: int) -> InvalidUtf8Error:
    """Return the error for the invalid byte ``buffer[at]``, with its offset in the text."""
    return InvalidUtf8Error(int(buffer[at]), int(cursor[0]["buffer_offset"]) + at)
