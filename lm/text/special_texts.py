"""Texts of special tokens inside documents of JSON Lines and Parquet, where they are ordinary text."""

import re
from collections.abc import Iterable, Iterator

from lm.text.sources import ByteRanges


class SpecialTextCounter:
    """Counts the texts of special tokens in blocks of UTF-8: the leftmost first, and of several the longest."""

    def __init__(self, tokens: Iterable[str]) -> None:
        ordered = sorted((token.encode() for token in tokens), key=len, reverse=True)
        self._longest = max(map(len, ordered), default=1)
        self._search = re.compile(b"|".join(map(re.escape, ordered))) if ordered else None
        self._pending = b""
        self._count = 0

    def update(self, block: bytes) -> None:
        """Add the next block of the text."""
        if not self._search:
            return
        data = self._pending + block
        position, limit = 0, len(data) - self._longest + 1  # a token from ``limit`` on may continue in the next block
        for match in self._search.finditer(data):
            if match.start() >= limit:
                break
            self._count += 1
            position = match.end()
        self._pending = data[max(position, limit) :]

    @property
    def total(self) -> int:
        """The number of texts in all blocks."""
        return self._count + (len(self._search.findall(self._pending)) if self._search else 0)


def split_ranges(ranges: ByteRanges, rows: ByteRanges) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, whether it is in ``rows``) of each part of ``ranges``. Both ascend."""
    for start, end in ranges:
        position = start
        for row_start, row_end in rows:
            first, last = max(row_start, position), min(row_end, end)
            if first < last:
                if position < first:
                    yield position, first, False
                yield first, last, True
                position = last
        if position < end:
            yield position, end, False


def join_adjacent(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending ranges, those without a gap between them as one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def rows_of_copy(ranges: ByteRanges, rows: ByteRanges, offset: int) -> list[tuple[int, int]]:
    """Return where ``rows`` are in a copy of the bytes ``ranges``, one after the other, from byte ``offset`` on."""
    copied: list[tuple[int, int]] = []
    for start, end, is_row in split_ranges(ranges, rows):
        if is_row:
            copied.append((offset, offset + end - start))
        offset += end - start
    return join_adjacent(copied)
