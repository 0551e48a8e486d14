"""Hash table of byte ranges of a text: equal words, lines or paragraphs get one number. Compares exactly.

The slots of a document are marked with its stamp, so that the next document needs no empty table.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import low_bits
from lm.kernels.jit import Bytes, Int, Int64s, UInt64s, Word, helper, inlined
from lm.kernels.simd import fold_product, load64, read, write

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LOW_HALF = np.uint64(0xFFFFFFFF)
MIN_SLOTS = 256
SHORT_BYTES = 8  # longest range that is its own key


class ItemTable(NamedTuple):
    """Arrays of a table of up to N items. ``slots``: (a power of two above N,), the others (N,)."""

    slots: UInt64s  # stamp << 32 | item
    keys: UInt64s
    begins: Int64s
    ends: Int64s


def make_item_table(items: int) -> ItemTable:
    """Return a table for up to ``items`` items of a document; no document has stamp 0."""
    places = [np.empty(items, np.int64) for _ in range(2)]
    return ItemTable(np.zeros(max(2 << items.bit_length(), MIN_SLOTS), np.uint64), np.empty(items, np.uint64), *places)


@inlined
def mix(key: Word, seed: Word) -> Word:
    """Return the hash of a word. Results do not depend on the seed, but the time does."""
    return fold_product(key ^ seed, _FACTOR)


@inlined
def key_of(data: Bytes, begin: Int, end: Int, seed: Word) -> Word:
    """Return a key of ``data[begin:end]``: its bytes, padded with zeros, if there are at most 8; else a hash."""
    if end - begin <= SHORT_BYTES:
        return load64(data, begin) & low_bits(8 * (end - begin))
    return hash_bytes(data, begin, end, seed)


@helper
def hash_bytes(data: Bytes, begin: Int, end: Int, seed: Word) -> Word:
    """Return a hash of ``data[begin:end]``."""
    hashed = seed ^ np.uint64(end - begin)
    while end - begin >= 8:
        hashed = fold_product(hashed ^ load64(data, begin), _FACTOR)
        begin += 8
    return fold_product(hashed ^ (load64(data, begin) & low_bits(8 * (end - begin))), _FACTOR)


@helper
def same_bytes(data: Bytes, first: Int, second: Int, size: Int) -> bool:
    """Return whether ``size`` bytes of ``data`` are the same at two places."""
    while size >= 8:
        if load64(data, first) != load64(data, second):
            return False
        first, second, size = first + 8, second + 8, size - 8
    return (load64(data, first) ^ load64(data, second)) & low_bits(8 * size) == 0


@helper
def find_or_add(
    data: Bytes, table: ItemTable, mask: Int, stamp: Int, seed: Word, key: Word, begin: Int, end: Int, count: Int
) -> Int:
    """Return the number of the item that equals ``data[begin:end]``; ``count`` if it is new, and then add it.

    ``mask``: the number of slots to use − 1. ``count``: items of this document so far.
    """
    size = end - begin
    slot = np.int64(mix(key, seed)) & mask
    while True:
        entry = read(table.slots, slot)
        if np.int64(entry >> np.uint64(32)) != stamp:
            break
        item = np.int64(entry & _LOW_HALF)
        start = read(table.begins, item)
        is_equal = read(table.keys, item) == key and read(table.ends, item) - start == size
        if is_equal and (size <= SHORT_BYTES or same_bytes(data, start, begin, size)):
            return item
        slot = (slot + 1) & mask
    write(table.slots, slot, np.uint64(stamp) << np.uint64(32) | np.uint64(count))
    write(table.keys, count, key)
    write(table.begins, count, begin)
    write(table.ends, count, end)
    return count
