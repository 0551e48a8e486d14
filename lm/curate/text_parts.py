"""Texts of a group as batches of documents, and the text of the documents that are kept."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.curate.document_reader import Document, batch_documents, read_documents
from lm.kernels.jit import Int64s
from lm.text.documents import TextStatistics
from lm.text.ingest import GroupTexts, Text
from lm.text.sources import ByteRanges, open_ranges
from lm.text.special_texts import join_adjacent, split_ranges

_TEXT = "text.txt"


class TextPart(NamedTuple):
    """A text, and the byte ranges in it that are filtered. All but the last one end with a separator."""

    url: str
    ranges: ByteRanges
    rows: ByteRanges
    """As :attr:`lm.text.ingest.Text.rows`."""
    source: str
    """What ``removed.parquet`` and the page call the text."""


class Batch(NamedTuple):
    """D consecutive documents of a text."""

    documents: list[Document]
    places: Int64s
    """(D,): where each begins in the text, in bytes."""
    part: int
    """Number of the text."""
    source: str
    is_row: bool
    """Whether they lie in :attr:`TextPart.rows`."""


def read_batches(parts: Iterable[TextPart], separator: str) -> Iterator[Batch]:
    """Yield the documents of texts in batches of some MB."""
    for number, part in enumerate(parts):
        pieces = split_ranges(part.ranges, part.rows)
        for is_row, group in groupby(pieces, key=lambda piece: piece[2]):
            ranges = [(start, end) for start, end, _ in group]
            with open_ranges(part.url, ranges) as blocks:
                for documents in batch_documents(read_documents(blocks, separator)):
                    places = _find_places(np.array([document.start for document in documents]), ranges)
                    yield Batch(documents, places, number, part.source, is_row)


def _find_places(starts: Int64s, ranges: ByteRanges) -> Int64s:
    """Return where in a text the bytes number ``starts`` of its ``ranges``, one after the other, lie."""
    edges = np.array(ranges)
    before = np.cumsum(edges[:, 1] - edges[:, 0]) - (edges[:, 1] - edges[:, 0])
    numbers = np.searchsorted(before, starts, "right") - 1
    return edges[numbers, 0] + starts - before[numbers]


class KeptText:
    """Writes documents with separators to ``text.txt`` in a directory. A context manager."""

    def __init__(self, out: Path, separator: str) -> None:
        self._path, self._separator = out / _TEXT, separator.encode()
        self._size = 0
        self._rows: list[tuple[int, int]] = []
        self._statistics = TextStatistics()
        self._files = ExitStack()

    def __enter__(self) -> "KeptText":
        self._file = self._files.enter_context(self._path.open("wb"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def write(self, texts: Sequence[bytes], is_row: bool) -> None:
        """Append documents in UTF-8. ``is_row``: only the separator is a special token in them."""
        for text in texts:
            self._statistics.add_document(len(text.decode("utf-8", "replace")))
        self._append([part for text in texts for part in (text, self._separator)], is_row)

    def copy(self, url: str, start: int, end: int, is_row: bool) -> None:
        """Append a document that may be larger than memory: the bytes ``start`` to ``end`` of a text."""
        length = 0
        with open_ranges(url, [(start, end)]) as blocks:
            for block in blocks:
                self._append([block], is_row)
                length += int(
                    np.count_nonzero(np.frombuffer(block, np.uint8) & 0xC0 != 0x80)
                )  # first bytes of characters
        self._append([self._separator], is_row)
        self._statistics.add_document(length)

    def _append(self, parts: Sequence[bytes], is_row: bool) -> None:
        data = b"".join(parts)
        self._file.write(data)
        if is_row and data:
            self._rows = join_adjacent([*self._rows, (self._size, self._size + len(data))])
        self._size += len(data)

    def texts(self) -> GroupTexts:
        """Return what was written, after the end of the ``with`` block. Without a document, delete the file."""
        if not self._size:
            self._path.unlink()
        kept = [Text(_TEXT, None, self._size, [(0, self._size)], self._rows)] if self._size else []
        separator = self._separator.decode() if self._rows else ""
        return GroupTexts(kept, kept_statistics=self._statistics, separator=separator)
