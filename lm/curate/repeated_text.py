"""Text without the lines or paragraphs that occur more than once in all texts, and a record of each change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.config import Unit
from lm.curate.document_batch import DocumentBatch, pack_utf8
from lm.curate.duplicate_lines import Lines, digest_lines_to_runs, drop_lines, find_lines
from lm.curate.filtered_text import Totals
from lm.curate.samples import choose_samples, cut_sample, sample_hash
from lm.curate.text_parts import Batch, KeptText, TextPart, read_batches
from lm.kernels.jit import Bytes
from lm.text.ingest import GroupTexts

CHANGED = "changed.parquet"
_SCHEMA = pa.schema(
    [
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("start", pa.int64()),
        ("bytes", pa.int64()),
        ("repeated", pa.int64()),
        ("bytes_left", pa.int64()),
    ]
)


class RepeatedSample(NamedTuple):
    """The beginning of a line or paragraph that was removed."""

    hash: str
    text: str


@dataclass
class RepeatFigures:
    """What a group of documents loses."""

    read: Totals = field(default_factory=Totals)
    changed: Totals = field(default_factory=Totals)
    """Documents that lose something, and the bytes that they lose."""
    removed: int = 0
    """Documents of which nothing but white space is left."""
    repeated: int = 0
    """Lines or paragraphs that were removed."""


class TextWithoutRepeats(NamedTuple):
    """The result of :func:`write_without_repeats`."""

    texts: GroupTexts
    figures: RepeatFigures
    samples: list[RepeatedSample]


def digest_repeats(parts: Sequence[TextPart], separator: str, unit: Unit, out: Path) -> int:
    """Write sorted files of the digests of the lines or paragraphs of a group to ``out``; return their number."""
    count = 0

    def batches() -> Iterator[DocumentBatch]:
        nonlocal count
        for batch in read_batches(parts, separator):
            packed = _pack(batch)
            count += len(find_lines(packed, unit).begins)
            yield packed

    digest_lines_to_runs(batches(), out, unit)
    return count


def write_without_repeats(
    parts: Sequence[TextPart], separator: str, repeated: Bytes, unit: Unit, out: Path
) -> TextWithoutRepeats:
    """Write a group of texts to ``text.txt`` without the lines or paragraphs whose bit in ``repeated`` is 1, and a row
    for each changed document to ``changed.parquet``.

    ``repeated``: uint8, one bit for each, in order, first bits first. Blank lines stay. A document of which nothing but
    white space is left is removed. One past MAX_DOCUMENT_BYTES is not looked at, and stays.
    """
    figures, first = RepeatFigures(), 0
    samples: list[RepeatedSample] = []
    with (
        KeptText(out, separator, parts) as kept,
        pq.ParquetWriter(out / CHANGED, _SCHEMA, compression="zstd") as records,
    ):
        for batch in read_batches(parts, separator):
            packed = _pack(batch)
            lines = find_lines(packed, unit)
            bits = np.unpackbits(repeated[first >> 3 :], count=len(lines.begins) + (first & 7))[first & 7 :]
            is_dropped = bits.astype(np.bool_) & ~_is_blank(packed, lines)
            first += len(lines.begins)
            left = drop_lines(packed, lines, is_dropped)
            starts = np.concatenate([[0], lines.document_ends])
            counts = np.diff(np.concatenate([[0], np.cumsum(is_dropped)])[starts])
            _write(kept, batch, left, counts, figures)
            if counts.any():
                records.write_table(_table(batch, left, counts))
            figures.repeated += int(counts.sum())
            samples = choose_samples([*samples, *_samples(packed, lines, np.flatnonzero(is_dropped))])
    return TextWithoutRepeats(kept.texts(), figures, samples)


def _pack(batch: Batch) -> DocumentBatch:
    return pack_utf8([document.data if document.is_whole else b"" for document in batch.documents])


def _is_blank(packed: DocumentBatch, lines: Lines) -> npt.NDArray[np.bool_]:
    """Return whether each line has white space of ASCII alone."""
    is_ink = ~np.isin(packed.data, np.frombuffer(b" \t\n\v\f\r", np.uint8))
    before = np.concatenate([[0], np.cumsum(is_ink)])
    return before[lines.begins] == before[lines.ends]


def _write(kept: KeptText, batch: Batch, left: DocumentBatch, counts: npt.NDArray[Any], figures: RepeatFigures) -> None:
    for number, document in enumerate(batch.documents):
        figures.read.add(1, document.size)
        if not document.is_whole:
            kept.copy(batch, number)
        elif not counts[number]:
            kept.write([document.data], batch, [number])
        else:
            text = left.data[left.offsets[number] : left.offsets[number + 1]].tobytes()
            is_left = bool(text.strip())
            figures.changed.add(1, document.size - len(text) * is_left)
            figures.removed += not is_left
            if is_left:
                kept.write([text], batch, [number])


def _table(batch: Batch, left: DocumentBatch, counts: npt.NDArray[Any]) -> pa.Table:
    changed = np.flatnonzero(counts)
    columns: dict[str, Any] = {
        "source": [batch.source] * len(changed),
        "start": batch.places[changed],
        "bytes": [batch.documents[number].size for number in changed],
        "repeated": counts[changed],
        "bytes_left": np.diff(left.offsets)[changed],
    }
    return pa.table(columns, schema=_SCHEMA)


def _samples(packed: DocumentBatch, lines: Lines, dropped: npt.NDArray[Any]) -> list[RepeatedSample]:
    texts = (packed.data[lines.begins[number] : lines.ends[number]].tobytes() for number in dropped)
    return [RepeatedSample(sample_hash(text), cut_sample(text)) for text in texts]
