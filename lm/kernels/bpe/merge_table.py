"""The merges of a vocabulary, as a table of pairs of nodes.

A node is a byte (0–255) or 256 + the rank of the merge that makes the token.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.jit import ONE, Bytes, Ids, Int, Int32s, UInt64s, Word, inlined, kernel
from lm.kernels.simd import read, write

MAX_MERGES = (1 << 20) - 256
NO_RANK = np.int32((1 << 25) - 1)  # greater than any rank
_EMPTY = np.uint64(0xFFFFFFFF)
_63 = np.uint64(63)


class MergeTable(NamedTuple):
    """The merges of a vocabulary and its token ids, by node."""

    ids: Ids  # (nodes,): token ids
    lengths: Int32s  # (nodes,): in bytes
    id_lengths: Int32s  # (token ids,): in bytes
    byte_pairs: Int32s  # (65536,): rank of the merge of two bytes
    pairs: Ids  # hash table: tag << 20 | rank
    filter: UInt64s  # bits by another hash: 0 if there is no such pair; small enough for the CPU's cache
    parts: UInt64s  # (merges,): left node << 22 | right node


def make_merge_table(ids: Ids, lengths: Int32s, id_lengths: Int32s, parts: Int32s) -> MergeTable:
    """Return the table for ``parts`` (merges, 2), the nodes that each merge joins. Each makes another token."""
    count = len(parts)
    byte_pairs = np.full(1 << 16, NO_RANK, np.int32)
    pairs = np.full(1 << (2 * count).bit_length(), _EMPTY, np.uint32)
    bits = np.zeros(1 << max(0, (16 * count).bit_length() - 6), np.uint64)  # 16 to 32 for each merge
    merges = MergeTable(ids, lengths, id_lengths, byte_pairs, pairs, bits, np.empty(count, np.uint64))
    fill_pairs(parts, merges)
    return merges


@inlined
def joined_nodes(left: int, right: int) -> Word:
    """Return two nodes as one word."""
    return np.uint64(left) << np.uint64(22) | np.uint64(right)


@inlined
def pair_home(pair: Word, size: int) -> tuple[Int, Word, Word]:
    """Return (index, tag, bit): where the search for a pair starts in a hash table of ``size`` entries, its tag, and
    the index of its bit in a filter."""
    mixed = pair * np.uint64(0x9E3779B97F4A7C15)
    index = np.int64((mixed >> np.uint64(32)) & np.uint64(size - 1))
    return index, mixed >> np.uint64(52) << np.uint64(20), mixed >> np.uint64(24)


@inlined
def filter_word(bit: Word, bits: UInt64s) -> Int:
    """Return the word of a filter that has a bit."""
    return np.int64(bit >> np.uint64(6) & np.uint64(len(bits) - 1))


@kernel
def fill_pairs(parts: Int32s, merges: MergeTable) -> None:
    """Enter the merges into the empty ``byte_pairs``, ``pairs`` and ``parts``."""
    pairs = merges.pairs
    for rank in range(len(parts)):
        left, right = np.int64(read(parts, 2 * rank)), np.int64(read(parts, 2 * rank + 1))
        if left < 256 and right < 256:
            write(merges.byte_pairs, left << 8 | right, np.int32(rank))
        pair = joined_nodes(left, right)
        write(merges.parts, rank, pair)
        i, tag, bit = pair_home(pair, len(pairs))
        word = filter_word(bit, merges.filter)
        write(merges.filter, word, read(merges.filter, word) | ONE << (bit & _63))
        while read(pairs, i) != _EMPTY:
            i = (i + 1) & (len(pairs) - 1)
        write(pairs, i, np.uint32(tag | np.uint64(rank)))


@inlined
def byte_pair_rank(byte_pairs: Int32s, buffer: Bytes, position: int) -> Int:
    """Return the rank of the merge of the two bytes at ``position``; NO_RANK if there is none."""
    return read(byte_pairs, np.int64(read(buffer, position)) << 8 | np.int64(read(buffer, position + 1)))


@inlined
def pair_rank(pairs: Ids, bits: UInt64s, parts: UInt64s, left: int, right: int) -> Int:
    """Return the rank of the merge of two nodes; NO_RANK if there is none. ``bits`` is the ``filter`` of the table."""
    pair = joined_nodes(left, right)
    i, tag, bit = pair_home(pair, len(pairs))
    if read(bits, filter_word(bit, bits)) >> (bit & _63) & ONE == 0:
        return NO_RANK
    while True:
        entry = np.uint64(read(pairs, i))
        if entry == _EMPTY:
            return NO_RANK
        rank = np.int64(entry ^ tag)
        if rank < 1 << 20 and read(parts, rank) == pair:
            return np.int32(rank)
        i = (i + 1) & (len(pairs) - 1)
