"""The text that a filter keeps: documents with separators in one file, and a record of each document removed."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.config import FilterConfig
from lm.curate.document_filter import Decisions, DocumentFilter
from lm.curate.document_reader import Document
from lm.curate.samples import MAX_SAMPLES, SAMPLE_CHARACTERS, choose_samples, cut_sample, sample_hash
from lm.curate.scorer import Scorer
from lm.curate.text_parts import Batch, KeptText, TextPart, read_batches
from lm.kernels.jit import Int64s
from lm.text.ingest import GroupTexts

REMOVED = "removed.parquet"
SHARE_EDGES = np.linspace(0, 1, 41)
"""Edges of the bins of a figure that is a share. Larger values are in the last bin."""
COUNT_EDGES = 2 ** (np.arange(-4, 125) / 4)
"""Edges of the bins of a figure that is a count. Zero is in the first bin."""


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
    languages: dict[str, list[Totals]] = field(default_factory=dict)
    """Documents that pass the rules, and kept ones, by language, if languages are chosen."""
    masked: dict[str, int] = field(default_factory=dict)
    """Replaced personal data, by kind."""
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
    "language": pa.dictionary(pa.int32(), pa.string()),
    "text": pa.large_string(),
}


def edges_of(figure: str) -> Any:
    """Return the edges of the bins of a figure."""
    is_count = figure in ("characters", "gopher_words", "gopher_mean_word_length", "gopher_stop_words")
    return COUNT_EDGES if is_count or figure.startswith("c4_") else SHARE_EDGES


def filter_texts(
    parts: Sequence[TextPart], separator: str, config: FilterConfig, out: Path, scorer: Scorer | None = None
) -> FilteredText:
    """Write the documents that the filter keeps to ``text.txt`` in the directory ``out``, each with its separator, and
    a row for each other one to ``removed.parquet``. Without a document to keep there is no ``text.txt``.

    Holds some documents at a time. Raises OSError if a file cannot be written.
    """
    with _Writer(separator, DocumentFilter(config, scorer), parts, out) as writer:
        for batch in read_batches(parts, separator):
            writer.write(batch)
    return writer.result()


class _Writer:
    """Filters batches of documents, and writes the files. A context manager."""

    def __init__(self, separator: str, judge: DocumentFilter, parts: Sequence[TextPart], out: Path) -> None:
        self.filter, self.config, self.out = judge, judge.config, out
        self.figures = FilterFigures()
        self.samples: dict[str, list[Sample]] = {}
        self._kept = KeptText(out, separator, parts)
        self._files = ExitStack()

    def __enter__(self) -> "_Writer":
        names = [name for name in _COLUMNS if name != "text" or self.config.keep_removed_text]
        self._schema = pa.schema([(name, _COLUMNS[name]) for name in names])
        self._files.enter_context(self._kept)
        self._removed = self._files.enter_context(
            pq.ParquetWriter(self.out / REMOVED, self._schema, compression="zstd")
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def write(self, batch: Batch) -> None:
        """Filter consecutive documents of a text."""
        decisions = self.filter.decide(batch.documents)
        numbers: list[int] = np.flatnonzero(decisions.reasons < 0).tolist()
        texts, masked = self.filter.mask([batch.documents[number].data for number in numbers])
        for kind, count in masked.items():
            self.figures.masked[kind] = self.figures.masked.get(kind, 0) + count
        self._kept.write(texts, batch, numbers)
        self._count(batch.documents, decisions, batch.source)
        self._write_removed(batch, decisions)

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
        for language in {*decisions.languages} - {None}:
            is_language = np.array([other == language for other in decisions.languages])
            read, kept = figures.languages.setdefault(str(language), [Totals(), Totals()])
            read.add(int(is_language.sum()), int(sizes[is_language].sum()))
            kept.add(int((is_language & is_kept).sum()), int(sizes[is_language & is_kept].sum()))
        for name, values in decisions.figures.items():
            edges = edges_of(name)
            counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
            figures.histograms[name] = figures.histograms.get(name, 0) + counts

    def _write_removed(self, batch: Batch, decisions: Decisions) -> None:
        removed = np.flatnonzero(decisions.reasons >= 0)
        if not len(removed):
            return
        first = self.figures.read.documents - len(batch.documents)
        reasons = [self.filter.reasons[place] for place in decisions.reasons[removed]]
        documents, values = [batch.documents[place] for place in removed], decisions.values[removed]
        columns: dict[str, Any] = {
            "document": first + removed,
            "source": [batch.source] * len(removed),
            "start": batch.places[removed],
            "bytes": [document.size for document in documents],
            "reason": reasons,
            "value": values,
            "language": [decisions.languages[place] for place in removed],
        }
        if self.config.keep_removed_text:
            texts, _ = self.filter.mask([document.data for document in documents])
            columns["text"] = [text.decode("utf-8", "ignore") for text in texts]
        self._removed.write_table(pa.table(columns, schema=self._schema))
        for document, reason, value in zip(documents, reasons, values.tolist(), strict=True):
            self._add_sample(document, reason, value, batch.source)

    def _add_sample(self, document: Document, reason: str, value: float, source: str) -> None:
        samples = self.samples.setdefault(reason, [])
        digest = sample_hash(document.data)
        if len(samples) == MAX_SAMPLES and digest >= samples[-1].hash:
            return
        [begin], _ = self.filter.mask([document.data[: 8 * SAMPLE_CHARACTERS]])
        self.samples[reason] = choose_samples([*samples, Sample(digest, cut_sample(begin), value, source)])

    def result(self) -> FilteredText:
        """Return the text and the figures, after the files are written."""
        return FilteredText(self._kept.texts(), self.figures, self.samples)
