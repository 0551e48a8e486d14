"""Texts of a group as batches of documents, and the text of the documents that are kept."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm.curate.document_reader import Document, batch_documents, read_documents
from lm.kernels.jit import Int64s
from lm.text.document_metadata import METADATA, MetadataTables
from lm.text.documents import TextStatistics
from lm.text.ingest import GroupTexts, Text
from lm.text.sources import ByteRanges, open_ranges
from lm.text.special_texts import join_adjacent, split_ranges

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT = "text.txt"


class TextPart(NamedTuple):
    """A text, and the byte ranges in it that are filtered. All but the last one end with a separator."""

    url: str
    ranges: ByteRanges
    rows: ByteRanges
    """As :attr:`lm.text.ingest.Text.rows`."""
    source: str
    """What ``removed.parquet`` and the page call the text."""
    metadata: "pa.Table | None" = None
    """Rows of :func:`lm.text.document_metadata.read_metadata` for the ranges; None if the text has none."""


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

    @property
    def ends(self) -> Int64s:
        """Where each document ends in the text, in bytes, without its separator: (D,)."""
        return self.places + np.array([document.size for document in self.documents], np.int64)


def find_metadata(part: TextPart, ends: Int64s) -> Int64s:
    """Return the row in ``part.metadata`` of each document that ends at ``ends``, int64 (D,); −1: it has none."""
    if part.metadata is None or not len(part.metadata):
        return np.full(len(ends), -1)
    row_starts, row_ends = (part.metadata[name].to_numpy() for name in ("start", "end"))
    rows = np.searchsorted(row_ends, ends)  # a row ends after the document's separator
    found = np.minimum(rows, len(row_ends) - 1)
    return np.where((rows < len(row_ends)) & (row_starts[found] <= ends), found, -1)


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

    def __init__(self, out: Path, separator: str, parts: Sequence[TextPart]) -> None:
        self._path, self._separator, self._parts = out / _TEXT, separator.encode(), parts
        self._size = 0
        self._rows: list[tuple[int, int]] = []
        self._statistics = TextStatistics()
        self._metadata = MetadataTables()
        self._files = ExitStack()

    def __enter__(self) -> "KeptText":
        self._file = self._files.enter_context(self._path.open("wb"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def write(self, texts: Sequence[bytes], batch: Batch, numbers: Sequence[int]) -> None:
        """Append documents in UTF-8, which are those of ``numbers`` in a batch, maybe in part."""
        sizes = np.array([len(text) + len(self._separator) for text in texts], np.int64)
        self._add_metadata(batch, numbers, sizes)
        for text in texts:
            self._statistics.add_document(len(text.decode("utf-8", "replace")))
        self._append([part for text in texts for part in (text, self._separator)], batch.is_row)

    def copy(self, batch: Batch, number: int) -> None:
        """Append document ``number`` of a batch, which may be larger than memory."""
        length, place, size = 0, int(batch.places[number]), batch.documents[number].size
        self._add_metadata(batch, [number], np.array([size + len(self._separator)]))
        with open_ranges(self._parts[batch.part].url, [(place, place + size)]) as blocks:
            for block in blocks:
                self._append([block], batch.is_row)
                length += int(np.count_nonzero(np.frombuffer(block, np.uint8) & 0xC0 != 0x80))  # begins of characters
        self._append([self._separator], batch.is_row)
        self._statistics.add_document(length)

    def _add_metadata(self, batch: Batch, numbers: Sequence[int], sizes: Int64s) -> None:
        """Note the metadata of documents that are appended next. ``sizes``: with separators."""
        part = self._parts[batch.part]
        if part.metadata is None:
            return
        import pyarrow as pa

        rows, ends = find_metadata(part, batch.ends[[*numbers]]), self._size + np.cumsum(sizes)
        is_found = rows >= 0
        table = part.metadata.take(pa.array(rows[is_found])).drop_columns("text")
        no_source = pa.array([None] * len(table), pa.int32())  # numbers of sources are those of another output
        columns = {"start": pa.array((ends - sizes)[is_found]), "end": pa.array(ends[is_found]), "source": no_source}
        for number, (name, column) in enumerate(columns.items()):
            table = table.set_column(number, name, column)
        self._metadata.add(_TEXT, table)

    def _append(self, parts: Sequence[bytes], is_row: bool) -> None:
        data = b"".join(parts)
        self._file.write(data)
        if is_row and data:
            self._rows = join_adjacent([*self._rows, (self._size, self._size + len(data))])
        self._size += len(data)

    def texts(self) -> GroupTexts:
        """Return what was written, after the end of the ``with`` block. Without a document, delete the file.

        The metadata of the documents, if there are any, go to ``metadata.parquet``.
        """
        self._metadata.write(self._path.with_name(METADATA))
        if not self._size:
            self._path.unlink()
        kept = [Text(_TEXT, None, self._size, [(0, self._size)], self._rows)] if self._size else []
        separator = self._separator.decode() if self._rows else ""
        return GroupTexts(kept, kept_statistics=self._statistics, separator=separator)
