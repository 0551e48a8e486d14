"""True Jaccard similarity of pairs of documents, and the union-find structure that joins the similar ones.

The plain form is in the tests: Python's sets, and a search through the graph of all similar pairs.
"""

import numpy as np
import numpy.typing as npt

from lm.kernels.jit import Int, Int64s, UInt64s, helper, kernel
from lm.kernels.simd import read, write


@helper
def find_root(parents: Int64s, item: Int) -> Int:
    """Return the first member of the cluster of an item, and halve the path to it."""
    parent = read(parents, item)
    while parent != item:
        grandparent = read(parents, parent)
        write(parents, item, grandparent)
        item, parent = grandparent, read(parents, grandparent)
    return item


@helper
def count_shared(shingles: UInt64s, begin: Int, end: Int, other: Int, other_end: Int) -> Int:
    """Return the number of elements that two sorted sets share."""
    shared = np.int64(0)
    while begin < end and other < other_end:
        first, second = read(shingles, begin), read(shingles, other)
        shared += first == second
        begin += first <= second
        other += second <= first
    return shared


@kernel
def join_similar_pairs(
    pairs: Int64s,
    places: Int64s,
    shingles: UInt64s,
    ends: Int64s,
    threshold: float,
    parents: Int64s,
    links: Int64s,
    similarities: npt.NDArray[np.float64],
) -> int:
    """Join the clusters of each pair whose Jaccard similarity is at least ``threshold``, unless they are one already.

    ``pairs`` (P, 2) are numbers of documents, and ``places`` (P, 2) those of their sets. Set i is
    ``shingles[ends[i]:ends[i + 1]]``, and not empty. The pairs that joined two clusters go to ``links`` (P, 2) and
    ``similarities`` (P,). Returns their number. A parent in ``parents`` is a document before it, or itself.
    """
    count = 0
    for pair in range(len(pairs)):
        first = find_root(parents, read(pairs, 2 * pair))
        second = find_root(parents, read(pairs, 2 * pair + 1))
        if first == second:
            continue
        i, j = read(places, 2 * pair), read(places, 2 * pair + 1)
        begin, end, other, other_end = read(ends, i), read(ends, i + 1), read(ends, j), read(ends, j + 1)
        size, other_size = end - begin, other_end - other
        if np.float64(min(size, other_size)) / np.float64(max(size, other_size)) < threshold:
            continue  # the similarity is at most this
        shared = count_shared(shingles, begin, end, other, other_end)
        similarity = np.float64(shared) / np.float64(size + other_size - shared)
        if similarity >= threshold:
            write(parents, max(first, second), min(first, second))
            write(links, 2 * count, read(pairs, 2 * pair))
            write(links, 2 * count + 1, read(pairs, 2 * pair + 1))
            write(similarities, count, similarity)
            count += 1
    return count


@kernel
def flatten_clusters(parents: Int64s) -> None:
    """Make the first member of each cluster the parent of all its members."""
    for item in range(len(parents)):
        write(parents, item, read(parents, read(parents, item)))  # a parent stands before its children
