"""The text that a filter keeps: documents with separators in one file, and a record of each document removed."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.config import FilterConfig
from lm.curate.document_filter import Decisions, DocumentFilter
from lm.curate.document_reader import Document, batch_documents, read_documents
from lm.kernels.jit import Int64s
from lm.text.documents import TextStatistics
from lm.text.ingest import GroupTexts, Text
from lm.text.sources import ByteRanges, open_ranges
from lm.text.special_texts import join_adjacent, split_ranges

TEXT, REMOVED = "text.txt", "removed.parquet"
MAX_SAMPLES = 10  # of each rule
_SAMPLE_CHARACTERS = 300
SHARE_EDGES = np.linspace(0, 1, 41)
"""Edges of the bins of a figure that is a share. Larger values are in the last bin."""
COUNT_EDGES = 2 ** (np.arange(-4, 125) / 4)
"""Edges of the bins of a figure that is a count. Zero is in the first bin."""


class TextPart(NamedTuple):
    """A text, and the byte ranges in it that are filtered. All but the last one end with a separator."""

    url: str
    ranges: ByteRanges
    rows: ByteRanges
    """As :attr:`lm.text.ingest.Text.rows`."""
    source: str
    """What ``removed.parquet`` and the page call the text."""


@dataclass
class Totals:
    """Documents and bytes, without separators."""

    documents: int = 0
    bytes: int = 0

    def add(self, documents: int, size: int) -> None:
        """Count some documents."""
        self.documents += documents
        self.bytes += size


class Sample(NamedTuple):
    """The beginning of a removed document."""

    hash: str
    """Of the document: those with the smallest hashes are shown, so that the choice does not depend on their order."""
    text: str
    value: float
    source: str


@dataclass
class FilterFigures:
    """What a filter did with a group of documents."""

    read: Totals = field(default_factory=Totals)
    kept: Totals = field(default_factory=Totals)
    removed: dict[str, Totals] = field(default_factory=dict)
    """By rule."""
    sources: dict[str, list[Totals]] = field(default_factory=dict)
    """Read and kept, by source."""
    histograms: dict[str, Int64s] = field(default_factory=dict)
    """Documents in each bin of SHARE_EDGES or COUNT_EDGES, by the name of the figure."""


@dataclass
class FilteredText:
    """The result of :func:`filter_texts`."""

    texts: GroupTexts
    figures: FilterFigures
    samples: dict[str, list[Sample]]
    """At most MAX_SAMPLES by rule, in the order of their hashes."""


_COLUMNS = {
    "document": pa.int64(),
    "source": pa.dictionary(pa.int32(), pa.string()),
    "start": pa.int64(),
    "bytes": pa.int64(),
    "reason": pa.dictionary(pa.int32(), pa.string()),
    "value": pa.float64(),
    "text": pa.large_string(),
}


def edges_of(figure: str) -> Any:
    """Return the edges of the bins of a figure."""
    is_count = figure in ("characters", "gopher_words", "gopher_mean_word_length", "gopher_stop_words")
    return COUNT_EDGES if is_count or figure.startswith("c4_") else SHARE_EDGES


def filter_texts(parts: Iterable[TextPart], separator: str, config: FilterConfig, out: Path) -> FilteredText:
    """Write the documents that the filter keeps to ``text.txt`` in the directory ``out``, each with its separator, and
    a row for each other one to ``removed.parquet``. Without a document to keep there is no ``text.txt``.

    Holds some documents at a time. Raises OSError if a file cannot be written.
    """
    with _Writer(separator, config, out) as writer:
        for part in parts:
            for is_row, ranges in _by_row(part):
                with open_ranges(part.url, ranges) as blocks:
                    for batch in batch_documents(read_documents(blocks, separator)):
                        writer.write(batch, part.source, ranges, is_row)
    return writer.result()


def _by_row(part: TextPart) -> Iterator[tuple[bool, ByteRanges]]:
    """Yield (whether they are rows, consecutive ranges) of a text."""
    pieces = split_ranges(part.ranges, part.rows)
    for is_row, group in groupby(pieces, key=lambda piece: piece[2]):
        yield is_row, [(start, end) for start, end, _ in group]


class _Writer:
    """Filters batches of documents, and writes the files. A context manager."""

    def __init__(self, separator: str, config: FilterConfig, out: Path) -> None:
        self.filter = DocumentFilter(config)
        self.separator, self.config, self.out = separator, config, out
        self.figures = FilterFigures()
        self.samples: dict[str, list[Sample]] = {}
        self.statistics = TextStatistics()
        self.rows: list[tuple[int, int]] = []
        self.size = 0  # of text.txt
        self._files = ExitStack()

    def __enter__(self) -> "_Writer":
        names = [name for name in _COLUMNS if name != "text" or self.config.keep_removed_text]
        self._schema = pa.schema([(name, _COLUMNS[name]) for name in names])
        self._text = self._files.enter_context((self.out / TEXT).open("wb"))
        self._removed = self._files.enter_context(
            pq.ParquetWriter(self.out / REMOVED, self._schema, compression="zstd")
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def write(self, batch: list[Document], source: str, ranges: ByteRanges, is_row: bool) -> None:
        """Filter consecutive documents, which lie in ``ranges`` of a text."""
        decisions = self.filter.decide(batch)
        kept = [document for document, reason in zip(batch, decisions.reasons, strict=True) if reason < 0]
        self._write_kept(kept, is_row)
        self._count(batch, decisions, source)
        self._write_removed(batch, decisions, source, ranges)

    def _write_kept(self, kept: list[Document], is_row: bool) -> None:
        end_mark = self.separator.encode()
        data = b"".join(part for document in kept for part in (document.data, end_mark))
        self._text.write(data)
        if is_row and data:
            self.rows = join_adjacent([*self.rows, (self.size, self.size + len(data))])
        self.size += len(data)
        for document in kept:
            self.statistics.add_document(len(document.data.decode("utf-8", "replace")))

    def _count(self, batch: list[Document], decisions: Decisions, source: str) -> None:
        sizes = np.array([document.size for document in batch])
        figures = self.figures
        read, kept = figures.sources.setdefault(source, [Totals(), Totals()])
        is_kept = decisions.reasons < 0
        for totals in (figures.read, read):
            totals.add(len(batch), int(sizes.sum()))
        for totals in (figures.kept, kept):
            totals.add(int(is_kept.sum()), int(sizes[is_kept].sum()))
        for place in np.unique(decisions.reasons[~is_kept]):
            is_removed = decisions.reasons == place
            totals = figures.removed.setdefault(self.filter.reasons[place], Totals())
            totals.add(int(is_removed.sum()), int(sizes[is_removed].sum()))
        for name, values in decisions.figures.items():
            edges = edges_of(name)
            counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
            figures.histograms[name] = figures.histograms.get(name, 0) + counts

    def _write_removed(self, batch: list[Document], decisions: Decisions, source: str, ranges: ByteRanges) -> None:
        removed = np.flatnonzero(decisions.reasons >= 0)
        if not len(removed):
            return
        first = self.figures.read.documents - len(batch)
        reasons = [self.filter.reasons[place] for place in decisions.reasons[removed]]
        documents, values = [batch[place] for place in removed], decisions.values[removed]
        columns: dict[str, Any] = {
            "document": first + removed,
            "source": [source] * len(removed),
            "start": _find_places(np.array([document.start for document in documents]), ranges),
            "bytes": [document.size for document in documents],
            "reason": reasons,
            "value": values,
        }
        if self.config.keep_removed_text:
            columns["text"] = [document.data.decode("utf-8", "ignore") for document in documents]
        self._removed.write_table(pa.table(columns, schema=self._schema))
        for document, reason, value in zip(documents, reasons, values.tolist(), strict=True):
            self._add_sample(document, reason, value, source)

    def _add_sample(self, document: Document, reason: str, value: float, source: str) -> None:
        samples = self.samples.setdefault(reason, [])
        digest = hashlib.blake2b(document.data, digest_size=8).hexdigest()
        if len(samples) == MAX_SAMPLES and digest >= samples[-1].hash:
            return
        text = document.data[: 4 * _SAMPLE_CHARACTERS].decode("utf-8", "ignore")[:_SAMPLE_CHARACTERS]
        self.samples[reason] = choose_samples([*samples, Sample(digest, text, value, source)])

    def result(self) -> FilteredText:
        """Return the text and the figures, after the files are written."""
        if not self.size:
            (self.out / TEXT).unlink()
        kept = [Text(TEXT, None, self.size, [(0, self.size)], self.rows)] if self.size else []
        separator = self.separator if self.rows else ""
        texts = GroupTexts(kept, kept_statistics=self.statistics, separator=separator)
        return FilteredText(texts, self.figures, self.samples)


def choose_samples(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples with the smallest hashes, one of each hash, in their order."""
    return [*{sample.hash: sample for sample in sorted(samples)}.values()][:MAX_SAMPLES]


def _find_places(starts: Int64s, ranges: ByteRanges) -> Int64s:
    """Return where in a text the bytes number ``starts`` of its ``ranges``, one after the other, lie."""
    edges = np.array(ranges)
    before = np.cumsum(edges[:, 1] - edges[:, 0]) - (edges[:, 1] - edges[:, 0])
    numbers = np.searchsorted(before, starts, "right") - 1
    return edges[numbers, 0] + starts - before[numbers]
