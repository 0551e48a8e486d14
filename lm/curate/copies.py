"""Copies of documents in groups of texts: each group is signed alone, then all are compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.curate.config import DeduplicateConfig
from lm.curate.document_batch import DocumentBatch, pack_utf8
from lm.curate.document_files import DocumentFiles
from lm.curate.document_reader import Document
from lm.curate.duplicate_documents import digest_documents_to_runs, find_equal_documents
from lm.curate.minhash import MinHash
from lm.curate.near_duplicates import NearDuplicates, find_near_duplicates, sign_documents_to_runs
from lm.curate.text_parts import KeptText, TextPart, read_batches
from lm.kernels.jit import Int64s
from lm.text.ingest import GroupTexts

PLACES = "documents.npy"


def make_minhash(config: DeduplicateConfig) -> MinHash | None:
    """Return the MinHash of a configuration; None if near-duplicates stay. Raises UserError if it is impossible."""
    if config.jaccard_threshold is None:
        return None
    return MinHash(config.num_hashes, config.num_bands, config.ngrams)


def sign_texts(
    parts: Sequence[TextPart], separator: str, has_digests: bool, minhash: MinHash | None, name: str, out: Path
) -> tuple[int, int]:
    """Sign the documents of a group. Return their number and bytes.

    Writes ``documents.npy``, int64 (D, 3) with text, begin and end of each document; with ``has_digests`` sorted files
    of their digests; and with ``minhash`` those of the keys of their bands. A document past MAX_DOCUMENT_BYTES is like
    no other: it is known by ``name``, a word that no other group has, and its place.
    """
    places: list[Int64s] = []

    def batches() -> Iterator[DocumentBatch]:
        places.clear()  # noted by each pass
        for batch in read_batches(parts, separator):
            sizes = np.array([document.size for document in batch.documents])
            numbers = np.full(len(sizes), batch.part)
            places.append(np.stack([numbers, batch.places, batch.places + sizes], axis=1))
            yield pack_utf8([_content(document, name, batch.part) for document in batch.documents])

    if has_digests:
        digest_documents_to_runs(batches(), out)
    if minhash:
        sign_documents_to_runs(batches(), out, minhash)
    documents = np.concatenate([np.empty((0, 3), np.int64), *places])
    np.save(out / PLACES, documents)
    return len(documents), int((documents[:, 2] - documents[:, 1]).sum())


def _content(document: Document, name: str, part: int) -> bytes:
    return document.data if document.is_whole else f"{name}x{part}x{document.start}".encode()  # one word


class SignedGroup(NamedTuple):
    """A group of texts, and the files that :func:`sign_texts` wrote for it."""

    urls: list[str]
    places: Int64s
    """(D, 3), see :func:`sign_texts`."""
    digests: list[Path]
    bands: list[Path]


@dataclass(frozen=True)
class Copies:
    """The copies among N documents of all groups, numbered through them."""

    survivors: Int64s
    """(N,): the first document that each one is a copy of; a document stays if this is its own number."""
    is_equal: npt.NDArray[np.bool_]
    """(N,): whether a document is removed as equal to an earlier one, and not as a near-duplicate."""
    links: Int64s
    """(R, 2): the verified pairs of near-duplicates that join clusters; see :class:`NearDuplicates`."""
    similarities: npt.NDArray[np.float64]
    """(R,): the Jaccard similarity of each pair."""
    group_starts: Int64s
    """(G + 1,): the number of the first document of each group."""
    documents: DocumentFiles

    def removed(self, group: int) -> Int64s:
        """Return the documents of a group that are removed, numbered from 0 in the group."""
        start, end = self.group_starts[group : group + 2]
        return np.flatnonzero(self.survivors[start:end] != np.arange(start, end))


def find_copies(groups: Sequence[SignedGroup], config: DeduplicateConfig) -> Copies:
    """Return the copies in all groups. The first document of a cluster stays, in the order of the groups.

    The result does not depend on how documents are divided into groups. Raises StorageError if a file is damaged.
    """
    starts = np.cumsum([0, *(len(group.places) for group in groups)])
    urls = [url for group in groups for url in group.urls]
    firsts = np.cumsum([0, *(len(group.urls) for group in groups)])
    files = np.concatenate(
        [np.empty(0, np.int64), *(group.places[:, 0] + first for group, first in zip(groups, firsts, strict=False))]
    )
    begins, ends = (
        np.concatenate([np.empty(0, np.int64), *(group.places[:, column] for group in groups)]) for column in (1, 2)
    )
    documents = DocumentFiles(urls, files, begins, ends)
    numbers = np.arange(len(files))
    firsts_of_equal, near = numbers, NearDuplicates(numbers, np.empty((0, 2), np.int64), np.empty(0))
    if config.equal:
        firsts_of_equal = find_equal_documents([path for group in groups for path in group.digests])
    if (minhash := make_minhash(config)) and config.jaccard_threshold is not None:
        runs = [path for group in groups for path in group.bands]
        near = find_near_duplicates(runs, documents, minhash, config.jaccard_threshold)
    survivors = numbers
    while np.any(
        survivors != (earlier := firsts_of_equal[near.survivors[survivors]])
    ):  # both lead to earlier documents
        survivors = earlier
    return Copies(survivors, firsts_of_equal != numbers, near.links, near.similarities, starts, documents)


def write_without(parts: Sequence[TextPart], separator: str, removed: Int64s, out: Path) -> GroupTexts:
    """Write the documents of a group but those of the numbers ``removed`` to ``text.txt``; return the texts."""
    with KeptText(out, separator, parts) as kept:
        first = 0
        for batch in read_batches(parts, separator):
            numbers = np.arange(len(batch.documents))
            for number in numbers[~np.isin(first + numbers, removed)].tolist():
                if (document := batch.documents[number]).is_whole:
                    kept.write([document.data], batch, [number])
                else:
                    kept.copy(batch, number)
            first += len(batch.documents)
    return kept.texts()
