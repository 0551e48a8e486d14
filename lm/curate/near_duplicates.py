"""Near-duplicate documents: signed group by group, found by MinHash and bands, verified by true Jaccard similarity.

Documents that share a band are compared; a pair of at least the threshold joins two clusters; the first document of a
cluster stays. In a band that more than 33 documents share, each one is compared with the first 32 and with the one
before it. So the clusters depend on the order of the documents at most, and not on groups, files or threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.curate.document_batch import DocumentBatch
from lm.curate.minhash import NO_WORDS, MinHash, shingle_sets
from lm.curate.sorted_runs import Keys, Records, merge_runs, open_runs, write_runs
from lm.kernels.curation.similar_pairs import flatten_clusters, join_similar_pairs
from lm.kernels.jit import Int64s

_MAX_COMPARED = 32  # first documents of a band that a document is compared with
_SLICE_RECORDS = 1 << 14  # whose pairs are made at a time: at most 33 each
_MAX_TEXT_BYTES = 8 << 20  # of documents whose shingles, 8 times as large, memory holds; two larger ones still count


class Documents(Protocol):
    """N documents that can be read by their numbers, such as :class:`lm.curate.document_files.DocumentFiles`."""

    @property
    def sizes(self) -> Int64s:
        """Bytes of each document, int64 (N,)."""

    def read(self, documents: Int64s) -> DocumentBatch:
        """Return the documents of these numbers, which ascend."""


@dataclass(frozen=True)
class NearDuplicates:
    """Clusters of N documents, and the pairs that prove them."""

    survivors: Int64s
    """(N,): the first document of each document's cluster. A document stays if this is its own number."""
    links: Int64s
    """(R, 2): verified pairs of documents, one for each removed document: they lead from it to its survivor."""
    similarities: npt.NDArray[np.float64]
    """(R,): true Jaccard similarity of each pair."""


def sign_documents_to_runs(batches: Iterable[DocumentBatch], folder: Path, minhash: MinHash) -> list[Path]:
    """Sign a group of documents and write the keys of their bands to new files in ``folder``; return these in order.

    Groups are independent of each other, so that a new one is signed alone.
    """

    def sign(batch: DocumentBatch) -> Keys:
        signatures = minhash.sign(batch)
        signed = np.flatnonzero((signatures != NO_WORDS).any(axis=1))
        keys = minhash.band_keys(signatures[signed]).ravel()
        return Keys(keys, None, np.repeat(signed, minhash.num_bands), len(signatures))

    return write_runs(map(sign, batches), folder, "bands", minhash.identity)


def find_near_duplicates(
    runs: Sequence[Path], documents: Documents, minhash: MinHash, threshold: float
) -> NearDuplicates:
    """Return the clusters of documents that ``runs`` has signed, in the order of the documents.

    Holds 8 bytes for each document, and 32 for each document that shares the most frequent key. Raises UserError if a
    run was signed with other settings or other documents, and StorageError if one is damaged.
    """
    opened = open_runs(runs, minhash.identity)
    parents: Int64s = np.arange(sum(run.num_items for run in opened))
    sizes, links, similarities = documents.sizes, [np.empty((0, 2), np.int64)], [np.empty(0)]
    if len(sizes) != len(parents):
        raise UserError(
            f"The runs have the bands of {len(parents):,} documents, not of {len(sizes):,}; sign the documents again."
        )
    for records in merge_runs(opened):
        for pairs in _candidate_pairs(records, parents):
            for part in _split_by_size(pairs, sizes):
                joined = _join(part, documents, minhash.ngrams, threshold, parents)
                links.append(joined[0])
                similarities.append(joined[1])
    flatten_clusters(parents)
    return NearDuplicates(parents, np.concatenate(links), np.concatenate(similarities))


def _candidate_pairs(records: Records, parents: Int64s) -> Iterator[Int64s]:
    """Yield (earlier, later) documents that share a key, in the order of keys and documents: int64 (P, 2).

    Pairs of one cluster are left out: whether they are similar changes nothing.
    """
    is_repeated = records.is_repeated()
    starts = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(is_repeated))))
    flatten_clusters(parents)
    items = records.items
    has_others = np.zeros(len(items), np.bool_)  # by the start of a key: not all its documents are one cluster
    has_others[starts[parents[items] != parents[items[starts]]]] = True
    later = np.flatnonzero(is_repeated & has_others[starts])
    for first in range(0, len(later), _SLICE_RECORDS):
        flatten_clusters(parents)
        places = later[first : first + _SLICE_RECORDS]
        ranks = places - starts[places]
        counts = np.minimum(ranks, _MAX_COMPARED) + (ranks > _MAX_COMPARED)
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = np.repeat(places, counts)
        begins = np.where(steps < _MAX_COMPARED, np.repeat(starts[places], counts) + steps, ends - 1)
        pairs = np.stack([items[begins], items[ends]], axis=1)
        pairs = pairs[parents[pairs[:, 0]] != parents[pairs[:, 1]]]
        if len(pairs):
            yield pairs


def _split_by_size(pairs: Int64s, sizes: Int64s) -> Iterator[Int64s]:
    """Yield ``pairs`` in parts whose documents are small enough together to hold their sets."""
    if len(pairs) > 1 and sizes[np.unique(pairs)].sum() > _MAX_TEXT_BYTES:
        middle = len(pairs) // 2
        yield from _split_by_size(pairs[:middle], sizes)
        yield from _split_by_size(pairs[middle:], sizes)
    else:
        yield pairs


def _join(
    pairs: Int64s, documents: Documents, ngrams: int, threshold: float, parents: Int64s
) -> tuple[Int64s, npt.NDArray[np.float64]]:
    numbers, places = np.unique(pairs, return_inverse=True)
    shingles, ends = shingle_sets(documents.read(numbers), ngrams)
    links, similarities = np.empty_like(pairs), np.empty(len(pairs))
    places = places.reshape(pairs.shape)
    count = join_similar_pairs(pairs, places, shingles, ends, threshold, parents, links, similarities)
    return links[:count], similarities[:count]
