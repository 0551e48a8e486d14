"""A summary of pretoken counts, read one partition at a time: it needs the memory of the counts alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from lm.tokenizer.pretoken_counts import read_partitions


class Kept(NamedTuple):
    """The pretokens that occur at least a number of times."""

    unique: int
    """Different ones."""
    bytes: int
    """Bytes of the different ones."""
    total: int
    """Occurrences."""


@dataclass
class CountsSummary:
    """What a file of counts contains."""

    kept: dict[int, Kept]
    """By minimum count."""
    common: list[tuple[bytes, int]]
    """The most common pretokens and their counts, descending."""
    longest: list[tuple[bytes, int]]
    """The longest pretokens and their counts, descending by length."""
    counts_by_rank: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    """At most 400 ranks, from 1, and the counts of the pretokens of these ranks."""

    @property
    def total(self) -> int:
        """All pretokens."""
        return self.kept[1].total

    @property
    def unique(self) -> int:
        """Different pretokens."""
        return self.kept[1].unique


def summarize_counts(
    path: Path, min_counts: Sequence[int], num_common: int = 20, num_longest: int = 10
) -> CountsSummary:
    """Summarize a file of counts one partition at a time. ``min_counts`` must include 1."""
    kept = dict.fromkeys(min_counts, Kept(0, 0, 0))
    all_counts = []
    common: list[tuple[bytes, int]] = []
    longest: list[tuple[bytes, int]] = []
    for table in read_partitions(path):
        counts, lengths = table["count"].to_numpy(), pc.binary_length(table["pretoken"])
        byte_sums = np.cumsum(lengths.to_numpy(), dtype=np.int64)
        count_sums = np.cumsum(counts)
        for min_count in kept:
            if rows := int(np.searchsorted(-counts, -min_count, "right")):  # the counts descend
                added = (rows, int(byte_sums[rows - 1]), int(count_sums[rows - 1]))
                kept[min_count] = Kept(*map(sum, zip(kept[min_count], added, strict=True)))
        all_counts.append(counts)
        rows_of_longest = pc.top_k_unstable(lengths, min(num_longest, len(table)))
        for found, part in ((common, table[:num_common]), (longest, table.take(rows_of_longest))):
            found += zip(*part.to_pydict().values(), strict=True)
    descending = -np.sort(-np.concatenate(all_counts))
    ranks = np.unique(np.geomspace(1, max(1, len(descending)), 400).astype(np.int64))[: len(descending)]
    common.sort(key=lambda row: (-row[1], row[0]))
    longest.sort(key=lambda row: (-len(row[0]), row[0]))
    return CountsSummary(kept, common[:num_common], longest[:num_longest], (ranks, descending[ranks - 1]))
