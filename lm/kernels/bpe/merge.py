"""Encoding of one pretoken: BPE merges in order of their ranks.

The reference is :mod:`lm.tokenizer.reference`. A node is a byte (0–255) or 256 + the rank of a merge.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.pretoken_table import Table, Workspace
from lm.kernels.jit import Bytes, Ids, Int, Int32s, UInt64s, Word, helper, inlined, kernel
from lm.kernels.simd import first_bit, last_bit, noinline, read, write

MAX_MERGES = (1 << 20) - 256
_BLOCK_BYTES = 2048  # of a long pretoken, merged at once
_OVERLAP_BYTES = 32  # before a block, merged again with it: at least
_NO_RANK = np.int32((1 << 25) - 1)  # greater than any rank
_NO_NODE = np.int32((1 << 22) - 1)  # part of no merge
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)
_EMPTY = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_32, _64, _5, _6 = map(np.int64, (32, 64, 5, 6))  # not literals: numba would compile a helper for each value
_ShortArrays = tuple[Int32s, Ids, UInt64s, Ids, Int32s, Int32s]


class MergeTable(NamedTuple):
    """The merges of a vocabulary and its token ids, by node."""

    ids: Ids  # (nodes,): token ids
    lengths: Int32s  # (nodes,): in bytes
    id_lengths: Int32s  # (token ids,): in bytes
    byte_pairs: Int32s  # (65536,): rank of the merge of two bytes
    pairs: Ids  # hash table: tag << 20 | rank
    parts: UInt64s  # (merges,): left node << 22 | right node


def make_merge_table(ids: Ids, lengths: Int32s, id_lengths: Int32s, parts: Int32s) -> MergeTable:
    """Return the table for ``parts`` (merges, 2), the nodes that each merge joins."""
    count = len(parts)
    byte_pairs = np.full(1 << 16, _NO_RANK, np.int32)
    pairs = np.full(1 << (2 * count).bit_length(), _EMPTY, np.uint32)
    merges = MergeTable(ids, lengths, id_lengths, byte_pairs, pairs, np.empty(count, np.uint64))
    fill_pairs(parts, merges)
    return merges


class BucketQueue(NamedTuple):
    """A priority queue of merges by rank: a linked list of text positions for each rank. Empty between pretokens."""

    heads: Int32s  # (merges,)
    tails: Int32s  # (merges,)
    bits: UInt64s  # bit r % 64 of word r // 64: list r is not empty
    summary: UInt64s  # the same for the words of ``bits``


def make_queue(merges: int) -> BucketQueue:
    """Return an empty queue for ``merges`` ranks."""
    words = merges // 64 + 1
    heads, tails = np.full((2, merges), -1, np.int32)
    return BucketQueue(heads, tails, np.zeros(words, np.uint64), np.zeros(words // 64 + 1, np.uint64))


class EncoderState(NamedTuple):
    """All that encoding uses: ``merges`` and ``whole_tokens`` are read-only, the rest belongs to one thread."""

    merges: MergeTable
    whole_tokens: Table  # read-only; a pretoken in it is one token, whatever the merges: the value is its id
    queue: BucketQueue
    table: Table
    work: Workspace


@inlined
def joined_nodes(left: int, right: int) -> Word:
    """Return two nodes as one word."""
    return np.uint64(left) << np.uint64(22) | np.uint64(right)


@inlined
def pair_home(pair: Word, size: int) -> tuple[Int, Word]:
    """Return (index, tag): where the search for a pair starts in a hash table of ``size`` entries, and its tag."""
    mixed = pair * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(size - 1)), mixed >> np.uint64(52) << np.uint64(20)


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
        i, tag = pair_home(pair, len(pairs))
        while read(pairs, i) != _EMPTY:
            i = (i + 1) & (len(pairs) - 1)
        write(pairs, i, np.uint32(tag | np.uint64(rank)))


@inlined
def byte_pair_rank(byte_pairs: Int32s, buffer: Bytes, position: int) -> Int:
    """Return the rank of the merge of the two bytes at ``position``; _NO_RANK if there is none."""
    return read(byte_pairs, np.int64(read(buffer, position)) << 8 | np.int64(read(buffer, position + 1)))


@inlined
def pair_rank(pairs: Ids, parts: UInt64s, left: int, right: int) -> Int:
    """Return the rank of the merge of two nodes; _NO_RANK if there is none."""
    pair = joined_nodes(left, right)
    i, tag = pair_home(pair, len(pairs))
    while True:
        entry = np.uint64(read(pairs, i))
        if entry == _EMPTY:
            return _NO_RANK
        rank = np.int64(entry ^ tag)
        if rank < 1 << 20 and read(parts, rank) == pair:
            return np.int32(rank)
        i = (i + 1) & (len(pairs) - 1)


@inlined
def encode_short(
    size: int, bits: int, buffer: Bytes, start: int, n: int, arrays: _ShortArrays, out: Ids, out_at: int
) -> int:
    """Encode a pretoken of ``n`` ≤ ``size`` − 2 bytes to ``out[out_at:]``, with ``size`` = 2^``bits``.

    Returns the number of ids. Byte i is at place i + 1, between two nodes that never merge. A merge puts its node at
    the left place and clears the bit of the right one in ``occupied``. The key of a place is the rank of its merge with
    the next node, above the place itself, so the smallest key is the next merge. All keys are updated and compared each
    time, with vector instructions; updating fewer needs branches that the CPU mispredicts, and is slower.
    """
    byte_pairs, pairs, parts, ids, nodes, keys = arrays
    no_key = np.int32(_NO_RANK << bits)  # above the keys of merges, at most the keys of no merge
    for i in range(size):
        write(keys, i, no_key)
    write(nodes, 0, _NO_NODE)
    write(nodes, n + 1, _NO_NODE)
    for i in range(n):
        write(nodes, i + 1, np.int32(read(buffer, start + i)))
    best = no_key
    for i in range(n - 1):
        key = np.int32(byte_pair_rank(byte_pairs, buffer, start + i) << bits | (i + 1))
        write(keys, i + 1, key)
        best = key if key < best else best
    occupied = _ALL_BITS >> np.uint64(62 - n)
    while best < no_key:
        place = np.int64(best & (size - 1))
        node = 256 + np.int64(best >> bits)
        write(nodes, place, np.int32(node))
        above = occupied & (_ALL_BITS << np.uint64(place + 1))
        removed = first_bit(above)
        after = first_bit(above & (above - _ONE))
        occupied ^= _ONE << np.uint64(removed)
        before = last_bit(occupied & ((_ONE << np.uint64(place)) - _ONE))
        key_here = np.int32(pair_rank(pairs, parts, node, np.int64(read(nodes, after))) << bits | place)
        key_before = np.int32(pair_rank(pairs, parts, np.int64(read(nodes, before)), node) << bits | before)
        best = no_key
        for i in range(size):
            key = read(keys, i)
            key = no_key if i == removed else key
            key = key_here if i == place else key
            key = key_before if i == before else key
            write(keys, i, key)
            best = key if key < best else best
    count = 0
    occupied &= occupied - _ONE
    while occupied & (occupied - _ONE):
        write(out, out_at + count, out.dtype.type(read(ids, np.int64(read(nodes, first_bit(occupied))))))
        count += 1
        occupied &= occupied - _ONE
    return count


@helper
def encode_30(buffer: Bytes, start: int, n: int, arrays: _ShortArrays, out: Ids, out_at: int) -> int:
    """Encode a pretoken of at most 30 bytes; see :func:`encode_short`."""
    noinline()
    return encode_short(_32, _5, buffer, start, n, arrays, out, out_at)


@helper
def encode_62(buffer: Bytes, start: int, n: int, arrays: _ShortArrays, out: Ids, out_at: int) -> int:
    """Encode a pretoken of at most 62 bytes; see :func:`encode_short`."""
    noinline()
    return encode_short(_64, _6, buffer, start, n, arrays, out, out_at)


@inlined
def enqueue(state: EncoderState, place: int, rank: int) -> None:
    """Set the rank of the merge at a place; if there is a merge, append the place to the list of its rank."""
    queue, following, previous = state.queue, state.work.following, state.work.previous
    write(state.work.ranks, place, rank)
    if rank == _NO_RANK:
        return
    tail = read(queue.tails, rank)
    write(previous, place, tail)
    write(following, place, np.int32(-1))
    if tail < 0:
        write(queue.heads, rank, np.int32(place))
        word = rank >> 6
        write(queue.bits, word, read(queue.bits, word) | _ONE << np.uint64(rank & 63))
        write(queue.summary, word >> 6, read(queue.summary, word >> 6) | _ONE << np.uint64(word & 63))
    else:
        write(following, tail, np.int32(place))
    write(queue.tails, rank, np.int32(place))


@inlined
def dequeue(state: EncoderState, place: int) -> None:
    """Remove a place from the list of its rank, if there is a merge at it."""
    queue, following, previous = state.queue, state.work.following, state.work.previous
    rank = read(state.work.ranks, place)
    if rank == _NO_RANK:
        return
    before, after = read(previous, place), read(following, place)
    if before >= 0:
        write(following, before, after)
    else:
        write(queue.heads, rank, after)
    if after >= 0:
        write(previous, after, before)
    else:
        write(queue.tails, rank, before)
    if before < 0 and after < 0:
        word = rank >> 6
        bits = read(queue.bits, word) & ~(_ONE << np.uint64(rank & 63))
        write(queue.bits, word, bits)
        if bits == 0:
            write(queue.summary, word >> 6, read(queue.summary, word >> 6) & ~(_ONE << np.uint64(word & 63)))


@helper
def merge_block(state: EncoderState, buffer: Bytes, start: int, n: int) -> None:
    """Merge ``n`` bytes in time linear in ``n``; each node is then in ``work.nodes`` at its first and last byte.

    A merge only makes merges of later ranks possible (the tokenizer has checked that its parts are made earlier). So
    the lists are emptied in order of rank, and each list is in the order of the text.
    """
    merges, queue, work = state.merges, state.queue, state.work
    nodes, lengths = work.nodes, merges.lengths
    for i in range(n):
        write(nodes, i, np.int32(read(buffer, start + i)))
    for i in range(n - 1):
        enqueue(state, i, byte_pair_rank(merges.byte_pairs, buffer, start + i))
    write(work.ranks, n - 1, _NO_RANK)
    group = 0
    while group < len(queue.summary):
        summary = read(queue.summary, group)
        if summary == 0:
            group += 1
            continue
        word = group << 6 | first_bit(summary)
        rank = word << 6 | first_bit(read(queue.bits, word))
        merged = 256 + rank
        length = read(lengths, merged)
        while read(queue.heads, rank) >= 0:
            place = np.int64(read(queue.heads, rank))
            dequeue(state, place)
            dequeue(state, place + read(lengths, np.int64(read(nodes, place))))
            write(nodes, place, np.int32(merged))
            write(nodes, place + length - 1, np.int32(merged))
            if place > 0:
                left = np.int64(read(nodes, place - 1))
                before = place - read(lengths, left)
                dequeue(state, before)
                enqueue(state, before, pair_rank(merges.pairs, merges.parts, left, merged))
            after = place + length
            write(work.ranks, place, _NO_RANK)
            if after < n:
                right = np.int64(read(nodes, after))
                enqueue(state, place, pair_rank(merges.pairs, merges.parts, merged, right))


@helper
def encode_long(state: EncoderState, buffer: Bytes, start: int, n: int, out: Ids, out_at: int) -> int:
    """Encode a pretoken of any length to ``out[out_at:]``; return the number of ids.

    Works in blocks that stay in the CPU's cache. A sequence of tokens is right if the bytes of each two neighbors
    encode to these two tokens: the first merge across a boundary would also happen there. So each block starts with
    the last tokens before it, and with more of them until the first boundary passes this test.
    """
    merges, nodes = state.merges, state.work.nodes
    lengths, id_lengths = merges.lengths, merges.id_lengths
    count = end = 0
    while end < n:
        block, stop, overlap = end, end + _BLOCK_BYTES, _OVERLAP_BYTES
        stop = n if n < stop else stop
        while True:
            while count > 0 and end - block < overlap:
                count -= 1
                block -= read(id_lengths, np.int64(read(out, out_at + count)))
            merge_block(state, buffer, start + block, stop - block)
            added = place = 0
            while place < stop - block:
                node = np.int64(read(nodes, place))
                out[out_at + count + added] = read(merges.ids, node)
                added += 1
                place += read(lengths, node)
            if count == 0:
                break
            left = np.int64(read(id_lengths, np.int64(read(out, out_at + count - 1))))
            right = np.int64(read(id_lengths, np.int64(read(out, out_at + count))))
            merge_block(state, buffer, start + block - left, left + right)
            first, second = np.int64(read(nodes, 0)), np.int64(read(nodes, left))
            if read(lengths, first) == left and read(lengths, second) == right:
                break
            overlap *= 4
        count += added
        end = stop
    return count
