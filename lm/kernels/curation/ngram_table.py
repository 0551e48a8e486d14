"""Hash table of n-grams of words, and the places of documents that have one of them.

Open addressing with linear probing. The plain form is in the tests: a dictionary of tuples of words.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.curation.normalized_text import CharacterTables
from lm.kernels.curation.word_hashes import (
    WordBlock,
    hash_runs,
    keep_last_words,
    multiplier_power,
    next_words,
)
from lm.kernels.jit import Bytes, Int, Int64s, UInt32s, UInt64s, Word, inlined, kernel
from lm.kernels.simd import read, write


class NgramTable(NamedTuple):
    """Hashes of n-grams, each with the number of the text that it is from. At least half of the slots are empty."""

    keys: UInt64s  # (a power of 2,): 0 in an empty slot; no n-gram has the hash 0
    sources: UInt32s


@inlined
def _find_slot(keys: UInt64s, key: Word) -> Int:
    """Return the slot of a key, or the empty slot for it."""
    mask = np.int64(len(keys) - 1)
    slot = np.int64(key >> np.uint64(1)) & mask
    while read(keys, slot) != 0 and read(keys, slot) != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def fill_ngram_table(hashes: UInt64s, sources: UInt32s, table: NgramTable) -> None:
    """Add n-grams that are not in the table."""
    for i in range(len(hashes)):
        key = read(hashes, i) | np.uint64(1)
        slot = _find_slot(table.keys, key)
        write(table.keys, slot, key)
        write(table.sources, slot, read(sources, i))


@kernel
def find_ngrams(
    data: Bytes,
    offsets: Int64s,
    tables: CharacterTables,
    block: WordBlock,
    n: int,
    table: NgramTable,
    spans: Int64s,
) -> Int:
    """Find what D documents share with the texts of the table; return the number of spans.

    Row i of ``spans`` (S, 4) becomes: document; begin and end of the shared words in ``data``; number of the text that
    their first n-gram is from. N-grams that overlap are one span. S is at least D and an element for each 2 n - 1
    bytes.
    """
    power, count = multiplier_power(n), np.int64(0)
    for document in range(len(offsets) - 1):
        position, end = np.int64(read(offsets, document)), np.int64(read(offsets, document + 1))
        kept, first_span = np.int64(0), count
        while position < end:
            num_words, position = next_words(data, position, end, tables, block, kept)
            for i in range(hash_runs(block, num_words, n, power)):
                key = read(block.runs, i) | np.uint64(1)
                slot = _find_slot(table.keys, key)
                if read(table.keys, slot) == 0:
                    continue
                begin, stop = read(block.begins, i), read(block.ends, i + n - 1)
                if count > first_span and begin <= read(spans, 4 * count - 2):
                    write(spans, 4 * count - 2, stop)
                    continue
                write(spans, 4 * count, np.int64(document))
                write(spans, 4 * count + 1, begin)
                write(spans, 4 * count + 2, stop)
                write(spans, 4 * count + 3, np.int64(read(table.sources, slot)))
                count += 1
            kept = keep_last_words(block, num_words, n)
    return count
