"""Text without the documents, or the words, that it shares with protected text; and a record of each place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.decontaminate import Contamination, ProtectedTexts, cut_spans
from lm.curate.document_batch import DocumentBatch, pack_utf8
from lm.curate.filtered_text import Totals
from lm.curate.samples import choose_samples, cut_sample, sample_hash
from lm.curate.text_parts import Batch, KeptText, TextPart, read_batches
from lm.text.ingest import GroupTexts

SHARED = "shared.parquet"
_SCHEMA = pa.schema(
    [
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("start", pa.int64()),
        ("bytes", pa.int64()),
        ("shared_start", pa.int64()),
        ("shared_bytes", pa.int64()),
        ("protected", pa.dictionary(pa.int32(), pa.string())),
    ]
)


class SharedSample(NamedTuple):
    """Words that a training document shares with a protected text."""

    hash: str
    protected: str
    text: str


@dataclass
class SharedFigures:
    """What a group of documents shares with protected texts."""

    read: Totals = field(default_factory=Totals)
    shared: Totals = field(default_factory=Totals)
    """Documents that share words, and their bytes."""
    protected: dict[str, int] = field(default_factory=dict)
    """Shared places by the name of the protected text."""


class DecontaminatedText(NamedTuple):
    """The result of :func:`decontaminate_texts`."""

    texts: GroupTexts
    figures: SharedFigures
    samples: list[SharedSample]


def decontaminate_texts(
    parts: Sequence[TextPart], separator: str, protected: ProtectedTexts, is_cut: bool, out: Path
) -> DecontaminatedText:
    """Write a group of texts to ``text.txt`` without the documents that share an n-gram with a protected text, or with
    ``is_cut`` without the shared words; and a row for each shared place to ``shared.parquet``.

    A document past MAX_DOCUMENT_BYTES is not looked at, and stays. Raises OSError if a file cannot be written.
    """
    figures = SharedFigures()
    samples: list[SharedSample] = []
    with (
        KeptText(out, separator, parts) as kept,
        pq.ParquetWriter(out / SHARED, _SCHEMA, compression="zstd") as records,
    ):
        for batch in read_batches(parts, separator):
            packed = pack_utf8([document.data if document.is_whole else b"" for document in batch.documents])
            found = protected.find(packed)
            _write(kept, batch, found, cut_spans(packed, found) if is_cut else None)
            names = [protected.names[source] for source in found.sources]
            if names:
                records.write_table(_table(batch, found, names))
            sizes = np.array([document.size for document in batch.documents])
            shared = np.unique(found.documents)
            figures.read.add(len(sizes), int(sizes.sum()))
            figures.shared.add(len(shared), int(sizes[shared].sum()))
            for name in names:
                figures.protected[name] = figures.protected.get(name, 0) + 1
            samples = choose_samples([*samples, *_samples(batch, found, names)])
    return DecontaminatedText(kept.texts(), figures, samples)


def _write(kept: KeptText, batch: Batch, found: Contamination, cut: DocumentBatch | None) -> None:
    shared = {*found.documents.tolist()}
    for number, document in enumerate(batch.documents):
        if not document.is_whole:
            kept.copy(batch, number)
        elif number not in shared:
            kept.write([document.data], batch, [number])
        elif cut is not None:
            kept.write([cut.data[cut.offsets[number] : cut.offsets[number + 1]].tobytes()], batch, [number])


def _table(batch: Batch, found: Contamination, names: list[str]) -> pa.Table:
    columns: dict[str, Any] = {
        "source": [batch.source] * len(names),
        "start": batch.places[found.documents],
        "bytes": [batch.documents[number].size for number in found.documents],
        "shared_start": found.begins,
        "shared_bytes": found.ends - found.begins,
        "protected": names,
    }
    return pa.table(columns, schema=_SCHEMA)


def _samples(batch: Batch, found: Contamination, names: list[str]) -> list[SharedSample]:
    places = zip(found.documents.tolist(), found.begins.tolist(), found.ends.tolist(), names, strict=True)
    texts = [(name, batch.documents[number].data[begin:end]) for number, begin, end, name in places]
    return [SharedSample(sample_hash(data), name, cut_sample(data)) for name, data in texts]
