"""MinHash signatures of documents, and the sets of shingles that they estimate the similarity of.

A shingle is a run of n normalized words. The plain form is in the tests: sets of strings, and Python's integers.
"""

import numpy as np

from lm.kernels.curation.normalized_text import CharacterTables
from lm.kernels.curation.word_hashes import (
    WordBlock,
    hash_first_words,
    hash_runs,
    keep_last_words,
    multiplier_power,
    next_words,
)
from lm.kernels.jit import Bytes, Int, Int64s, UInt32s, UInt64s, helper, kernel
from lm.kernels.simd import read, write


@kernel
def sign_documents(
    data: Bytes,
    offsets: Int64s,
    tables: CharacterTables,
    block: WordBlock,
    shingles: UInt32s,
    n: int,
    multipliers: UInt32s,
    addends: UInt32s,
    signatures: UInt32s,
) -> None:
    """Write the signature of each document, ``signatures`` (D, K): the least value of each of K permutations.

    Permutation k of the upper 32 bits x of a shingle's hash is ``multipliers[k] * x + addends[k]`` modulo 2^32. A
    document without words gets the largest numbers. ``shingles`` (BLOCK_WORDS,) is a workspace.
    """
    power, num_hashes = multiplier_power(n), len(multipliers)
    for document in range(len(offsets) - 1):
        for k in range(num_hashes):
            signatures[document, k] = np.uint32(0xFFFFFFFF)
        position, end = np.int64(read(offsets, document)), np.int64(read(offsets, document + 1))
        kept, is_first = np.int64(0), True
        while is_first or position < end:
            count, position = next_words(data, position, end, tables, block, kept)
            num_runs = hash_shingles(block, count, n, power, is_first and position >= end)
            for i in range(num_runs):
                write(shingles, i, np.uint32(read(block.runs, i) >> np.uint64(32)))
            for k in range(num_hashes):
                multiplier, addend, least = multipliers[k], addends[k], signatures[document, k]
                for i in range(num_runs):
                    least = min(least, np.uint32(shingles[i] * multiplier + addend))
                signatures[document, k] = least
            kept, is_first = keep_last_words(block, count, n), False


@helper
def hash_shingles(block: WordBlock, count: Int, n: Int, power: np.uint64, is_whole: bool) -> Int:
    """Write the hashes of the shingles that end in a block of ``count`` words; return their number.

    A document of fewer than ``n`` words has one shingle: all its words. ``is_whole``: the block has all its words.
    """
    if is_whole and 0 < count < n:
        write(block.runs, 0, hash_first_words(block, count))
        return 1
    return hash_runs(block, count, n, power)


@kernel
def list_shingles(
    data: Bytes,
    offsets: Int64s,
    tables: CharacterTables,
    block: WordBlock,
    n: int,
    has_short: bool,
    shingles: UInt64s,
    ends: Int64s,
) -> None:
    """Write the hashes of all shingles of each document, one document after the other, and where each one ends.

    ``has_short``: a document of fewer than ``n`` words has one shingle, else none. ``shingles`` needs an element for
    every two bytes of a document and one more; ``ends`` is (D,).
    """
    power, total = multiplier_power(n), np.int64(0)
    for document in range(len(offsets) - 1):
        position, end = np.int64(read(offsets, document)), np.int64(read(offsets, document + 1))
        kept, is_first = np.int64(0), True
        while is_first or position < end:
            count, position = next_words(data, position, end, tables, block, kept)
            num_runs = hash_shingles(block, count, n, power, has_short and is_first and position >= end)
            for i in range(num_runs):
                write(shingles, total + i, read(block.runs, i))
            total += num_runs
            kept, is_first = keep_last_words(block, count, n), False
        write(ends, document, total)
