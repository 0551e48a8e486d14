"""Records of removed copies: a table of them, the pairs that prove near-duplicates, figures and examples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.copies import Copies
from lm.curate.filtered_text import Totals
from lm.curate.minhash import jaccard_similarity

REMOVED, LINKS = "removed.parquet", "links.parquet"
_MAX_SAMPLES = 10  # of equal documents, and of near-duplicates
_SAMPLE_CHARACTERS = 300
_MAX_SAMPLE_BYTES = 1 << 20  # of a document whose similarity is computed


@dataclass
class CopyFigures:
    """What was removed from the documents of all groups."""

    read: Totals = field(default_factory=Totals)
    equal: Totals = field(default_factory=Totals)
    """Removed documents that are equal to an earlier one."""
    near_duplicates: Totals = field(default_factory=Totals)
    """Other removed documents."""
    clusters: dict[str, int] = field(default_factory=dict)
    """Clusters by their number of documents, without those of one document."""
    sources: dict[str, list[Totals]] = field(default_factory=dict)
    """Read and kept, by source."""


class CopySample(NamedTuple):
    """A removed document and the one that stays."""

    reason: str
    removed: str
    kept: str
    similarity: float


def write_copy_records(copies: Copies, sources: Sequence[str], out: Path) -> CopyFigures:
    """Write ``removed.parquet``, a row for each removed document, and ``links.parquet``, the verified pairs.

    ``sources``: the name of each text. Documents are named by the text and their first byte. Raises OSError if a file
    cannot be written.
    """
    documents, sizes = copies.documents, copies.documents.sizes
    numbers = np.arange(len(sizes))
    removed = np.flatnonzero(copies.survivors != numbers)
    names = pa.array(list(sources), pa.string())

    def name(chosen: np.ndarray) -> tuple[pa.Array, pa.Array]:
        return pa.DictionaryArray.from_arrays(documents.files[chosen], names), pa.array(documents.begins[chosen])

    reasons = pa.array(["near_duplicate", "equal"]).take(pa.array(copies.is_equal[removed].astype(np.int8)))
    (source, start), (kept_source, kept_start) = name(removed), name(copies.survivors[removed])
    columns = {"source": source, "start": start, "bytes": sizes[removed], "reason": reasons}
    pq.write_table(pa.table(columns | {"kept_source": kept_source, "kept_start": kept_start}), out / REMOVED)
    (source, start), (other_source, other_start) = name(copies.links[:, 0]), name(copies.links[:, 1])
    columns = {"source": source, "start": start, "other_source": other_source, "other_start": other_start}
    pq.write_table(pa.table(columns | {"similarity": copies.similarities}), out / LINKS)

    figures = CopyFigures()
    figures.read.add(len(sizes), int(sizes.sum()))
    is_equal = copies.is_equal[removed]
    for totals, chosen in ((figures.equal, removed[is_equal]), (figures.near_duplicates, removed[~is_equal])):
        totals.add(len(chosen), int(sizes[chosen].sum()))
    counts = np.bincount(copies.survivors, minlength=1)
    figures.clusters = {str(size): count for size, count in sorted(Counter(counts[counts > 1].tolist()).items())}
    is_kept = copies.survivors == numbers
    for place, source_name in enumerate(sources):
        is_part = documents.files == place
        read, kept = figures.sources.setdefault(source_name, [Totals(), Totals()])
        read.add(int(is_part.sum()), int(sizes[is_part].sum()))
        kept.add(int((is_part & is_kept).sum()), int(sizes[is_part & is_kept].sum()))
    return figures


def sample_copies(copies: Copies, ngrams: int) -> list[CopySample]:
    """Return some removed documents beside those that stay, chosen by a hash of their numbers."""
    removed = np.flatnonzero(copies.survivors != np.arange(len(copies.survivors)))
    samples: list[CopySample] = []
    for reason, is_equal in (("equal", True), ("near_duplicate", False)):
        chosen = removed[copies.is_equal[removed] == is_equal]
        hashes = chosen.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for number in chosen[np.argsort(hashes)[:_MAX_SAMPLES]].tolist():
            text, kept = (_read_begin(copies, document) for document in (number, int(copies.survivors[number])))
            similarity = 1.0 if is_equal else jaccard_similarity(text, kept, ngrams)
            samples.append(CopySample(reason, text[:_SAMPLE_CHARACTERS], kept[:_SAMPLE_CHARACTERS], similarity))
    return samples


def _read_begin(copies: Copies, document: int) -> str:
    batch = copies.documents.read(np.array([document]))
    return batch.data[: min(int(batch.offsets[-1]), _MAX_SAMPLE_BYTES)].tobytes().decode("utf-8", "ignore")
