"""Duplicate documents: exact ones by a 128-bit digest, and the course's function for files that are nearly equal."""

import shutil
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lm.common.errors import UserError, translate_write_errors
from lm.curate.document_batch import DocumentBatch
from lm.curate.document_files import DocumentFiles, Paths, output_paths
from lm.curate.minhash import MinHash
from lm.curate.near_duplicates import find_near_duplicates, sign_documents_to_runs
from lm.curate.sorted_runs import Keys, merge_runs, open_runs, write_runs
from lm.kernels.curation.digests import digest_spans
from lm.kernels.jit import Int64s

_IDENTITY = {"kind": "documents"}
_BATCH_BYTES = 16 << 20


def digest_documents_to_runs(batches: Iterable[DocumentBatch], folder: Path) -> list[Path]:
    """Write the digests of a group of documents to new files in ``folder``; return these in order.

    Documents are compared as bytes, without ASCII white space around them. Groups are independent of each other.
    """

    def digest(batch: DocumentBatch) -> Keys:
        count = len(batch.offsets) - 1
        high, low = np.empty((2, count), np.uint64)
        digest_spans(batch.data, batch.offsets[:-1], batch.offsets[1:], True, high, low)
        return Keys(high, low, np.arange(count), count)

    return write_runs(map(digest, batches), folder, "documents", _IDENTITY)


def find_equal_documents(runs: Sequence[Path]) -> Int64s:
    """Return the first document that is equal to each document of ``runs``, int64 (N,): its own number if it is new.

    Raises StorageError if a run is damaged. Holds 8 bytes for each document.
    """
    opened = open_runs(runs, _IDENTITY)
    firsts: Int64s = np.arange(sum(run.num_items for run in opened))
    for records in merge_runs(opened):
        is_repeated = records.is_repeated()
        starts = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(is_repeated))))
        firsts[records.items] = records.items[starts]
    start = 0
    for run in opened:
        repeats = run.read_repeats().astype(np.int64) + start
        firsts[repeats[:, 0]] = firsts[repeats[:, 1]]
        start += run.num_items
    return firsts


def deduplicate_documents(
    input_files: Paths,
    output_directory: str | PathLike[str],
    num_hashes: int,
    num_bands: int,
    ngrams: int,
    jaccard_threshold: float,
) -> None:
    """Copy the files that are no near-duplicate of an earlier file to a directory, under their names.

    Each file is a document. As in assignment 4 of Stanford's CS336: MinHash signatures of ``num_hashes`` values in
    ``num_bands`` bands, over shingles of ``ngrams`` normalized words; files that share a band are joined if their true
    Jaccard similarity is at least ``jaccard_threshold``. The first file of a cluster stays.

    Raises UserError for settings that are impossible, for files that cannot be read, and for names that occur twice.
    """
    minhash = MinHash(num_hashes, num_bands, ngrams)
    if not 0 < jaccard_threshold <= 1:
        raise UserError(f"jaccard_threshold is {jaccard_threshold}; it must be above 0 and at most 1.")
    paths, outputs = output_paths(input_files, output_directory)
    documents = DocumentFiles.whole_files(paths)
    with TemporaryDirectory(prefix="textmill-") as folder:
        runs = sign_documents_to_runs(_read_batches(documents), Path(folder), minhash)
        survivors = find_near_duplicates(runs, documents, minhash, jaccard_threshold).survivors
    for number, (path, output) in enumerate(zip(paths, outputs, strict=True)):
        if survivors[number] == number:
            with translate_write_errors(output):
                shutil.copyfile(path, output)


def _read_batches(documents: DocumentFiles) -> Iterable[DocumentBatch]:
    batches = np.cumsum(documents.sizes) // _BATCH_BYTES
    for batch in np.unique(batches):
        yield documents.read(np.flatnonzero(batches == batch))
