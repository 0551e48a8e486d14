"""Lines and paragraphs that occur more than once in all documents together, and documents without them."""

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.common.errors import StorageError, translate_write_errors
from lm.curate.config import Unit
from lm.curate.document_batch import DocumentBatch, pack_utf8, pad_documents
from lm.curate.document_files import Paths, output_paths
from lm.curate.sorted_runs import Keys, merge_runs, open_runs, write_runs
from lm.kernels.curation.digests import digest_spans, split_lines
from lm.kernels.jit import Bytes, Int64s

_BLOCK_BYTES = 16 << 20


class Lines(NamedTuple):
    """L lines or paragraphs of D documents, in order."""

    begins: Int64s
    """(L,): first byte in the batch's data."""
    ends: Int64s
    """(L,)"""
    next_begins: Int64s
    """(L,): after the line feeds that follow."""
    document_ends: Int64s
    """(D,): number of lines of all documents up to this one."""


def find_lines(batch: DocumentBatch, unit: Unit) -> Lines:
    """Return the lines or paragraphs of each document. Paragraphs are separated by two line feeds or more."""
    num_documents = len(batch.offsets) - 1
    text = batch.data[batch.offsets[0] : batch.offsets[-1]]
    count = int(np.count_nonzero(text == ord("\n"))) + num_documents
    lines, document_ends = np.empty((3, count), np.int64), np.empty(num_documents, np.int64)
    count = split_lines(*batch, unit == "paragraph", lines, document_ends)
    begins, ends, next_begins = lines[:, :count]
    return Lines(begins, ends, next_begins, document_ends)


def digest_lines_to_runs(batches: Iterable[DocumentBatch], folder: Path, unit: Unit) -> list[Path]:
    """Write the digests of the lines of a group of documents to new files in ``folder``; return these in order.

    Groups are independent of each other.
    """

    def digest(batch: DocumentBatch) -> Keys:
        lines = find_lines(batch, unit)
        count = len(lines.begins)
        high, low = np.empty((2, count), np.uint64)
        digest_spans(batch.data, lines.begins, lines.ends, False, high, low)
        return Keys(high, low, np.arange(count), count)

    return write_runs(map(digest, batches), folder, f"{unit}s", _identity(unit))


def _identity(unit: Unit) -> dict[str, Any]:
    return {"kind": f"{unit}s"}


def find_repeated_lines(runs: Sequence[Path], unit: Unit) -> Bytes:
    """Return one bit for each line of ``runs``, first bits first: 1 if the line occurs more than once in all.

    uint8 (lines / 8, rounded up). Raises StorageError if a run is damaged.
    """
    opened = open_runs(runs, _identity(unit))
    bits: Bytes = np.zeros(-(-sum(run.num_items for run in opened) // 8), np.uint8)

    def mark(items: Int64s) -> None:
        np.bitwise_or.at(bits, items >> 3, np.uint8(0x80) >> (items & 7).astype(np.uint8))

    for records in merge_runs(opened):
        is_repeated = records.is_repeated()
        is_repeated[:-1] |= is_repeated[1:]  # the first one too
        mark(records.items[is_repeated])
    start = 0
    for run in opened:
        repeats = run.read_repeats().astype(np.int64) + start
        mark(repeats.ravel())
        start += run.num_items
    return bits


def drop_lines(batch: DocumentBatch, lines: Lines, is_dropped: npt.NDArray[np.bool_]) -> DocumentBatch:
    """Return the documents without some of their L lines, and without the line feeds after these.

    ``is_dropped`` is (L,).
    """
    first, last = batch.offsets[0], batch.offsets[-1]
    sizes = np.diff(lines.next_begins, prepend=first)  # the lines with their line feeds are all of the text
    data = batch.data[first:last][np.repeat(~is_dropped, sizes)]
    kept = np.concatenate([[0], np.cumsum(np.where(is_dropped, 0, sizes))])
    return pad_documents(data, kept[np.concatenate([[0], lines.document_ends])])


def drop_repeated_lines(batches: Iterable[DocumentBatch], repeated: Bytes, unit: Unit) -> Iterator[DocumentBatch]:
    """Yield the documents of ``batches`` without repeated lines.

    ``repeated`` has a bit for each line of all batches, as in :func:`find_repeated_lines`.
    """
    start = 0
    for batch in batches:
        lines = find_lines(batch, unit)
        stop = start + len(lines.begins)
        yield drop_lines(batch, lines, _unpack(repeated, start, stop))
        start = stop


def _unpack(bits: Bytes, start: int, stop: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(bits[start >> 3 : (stop + 7) >> 3])[start & 7 :][: stop - start].astype(np.bool_)


def deduplicate_lines(input_files: Paths, output_directory: str | PathLike[str]) -> None:
    """Write each file to a directory, under its name, with only the lines that occur once in all files together.

    As in assignment 4 of Stanford's CS336: a line that occurs more than once is removed everywhere. A line ends at a
    line feed, which is not compared. Holds some 300 MB, however large the files are.

    Raises UserError for files that cannot be read, and for names that occur twice.
    """
    paths, outputs = output_paths(input_files, output_directory)
    with TemporaryDirectory(prefix="textmill-") as folder:
        batches = (batch for path in paths for batch in _read_lines(path))
        repeated = find_repeated_lines(digest_lines_to_runs(batches, Path(folder), "line"), "line")
    start = 0
    for path, output in zip(paths, outputs, strict=True):
        with translate_write_errors(output), output.open("wb") as file:
            for batch in _read_lines(path):
                lines = find_lines(batch, "line")
                kept = drop_lines(batch, lines, _unpack(repeated, start, start + len(lines.begins)))
                file.write(kept.data[: kept.offsets[-1]].tobytes())
                start += len(lines.begins)


def _read_lines(path: Path) -> Iterator[DocumentBatch]:
    """Yield blocks of whole lines, as one document each."""
    rest = b""
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                cut = block.rfind(b"\n") + 1
                if cut:
                    yield pack_utf8([rest + block[:cut]])
                    rest = b""
                rest += block[cut:]
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from None
    if rest:
        yield pack_utf8([rest])
