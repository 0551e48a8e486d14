"""Encoding of one pretoken: BPE merges in order of their ranks, and the table of all merges.

A node is a byte (0–255) or 256 + the rank of the merge that makes the token.

The reference is :mod:`lm.tokenizer.reference`.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.pretoken_table import Table, Workspace
from lm.kernels.jit import ALL_BITS, ONE, Bytes, Ids, Int, Int32s, UInt64s, Word, helper, inlined, kernel
from lm.kernels.simd import first_bit, last_bit, noinline, read, write

MAX_MERGES = (1 << 20) - 256
NO_RANK = np.int32((1 << 25) - 1)  # greater than any rank
_EMPTY = np.uint64(0xFFFFFFFF)
_63 = np.uint64(63)
_BLOCK_BYTES = 2048  # of a long pretoken, merged at once
_OVERLAP_BYTES = 32  # before a block, merged again with it: at least
_NO_NODE = np.int32((1 << 22) - 1)  # part of no merge
_ShortArrays = tuple[Int32s, Ids, UInt64s, UInt64s, Ids, Int32s, Int32s]


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
def encode_short(
    size: int, bits: int, buffer: Bytes, start: int, n: int, arrays: _ShortArrays, out: Ids, out_at: int
) -> int:
    """Encode a pretoken of ``n`` ≤ ``size`` − 2 bytes to ``out[out_at:]``, with ``size`` = 2^``bits``.

    Returns the number of ids. Byte i is at place i + 1, between two nodes that never merge. A merge puts its node at
    the left place and clears the bit of the right one in ``occupied``. The key of a place is the rank of its merge with
    the next node, above the place itself, so the smallest key is the next merge. All keys are updated and compared each
    time, with vector instructions; updating fewer needs branches that the CPU mispredicts, and is slower.
    """
    byte_pairs, pairs, words, parts, ids, nodes, keys = arrays  # words: of the filter
    no_key = np.int32(NO_RANK << bits)  # above the keys of merges, at most the keys of no merge
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
    occupied = ALL_BITS >> np.uint64(62 - n)
    while best < no_key:
        place = np.int64(best & (size - 1))
        node = np.int64(256 + (best >> bits))
        write(nodes, place, np.int32(node))
        above = occupied & (ALL_BITS << np.uint64(place + 1))
        removed = first_bit(above)
        after = first_bit(above & (above - ONE))
        occupied ^= ONE << np.uint64(removed)
        before = last_bit(occupied & ((ONE << np.uint64(place)) - ONE))
        key_here = np.int32(pair_rank(pairs, words, parts, node, np.int64(read(nodes, after))) << bits | place)
        key_before = np.int32(pair_rank(pairs, words, parts, np.int64(read(nodes, before)), node) << bits | before)
        best = no_key
        for i in range(size):
            key = read(keys, i)
            key = no_key if i == removed else key
            key = key_here if i == place else key
            key = key_before if i == before else key
            write(keys, i, key)
            best = key if key < best else best
    count = 0
    occupied &= occupied - ONE
    while occupied & (occupied - ONE):
        write(out, out_at + count, out.dtype.type(read(ids, np.int64(read(nodes, first_bit(occupied))))))
        count += 1
        occupied &= occupied - ONE
    return count


@helper
def encode_30(buffer: Bytes, start: int, n: int, arrays: _ShortArrays, out: Ids, out_at: int) -> int:
    """Encode a pretoken of at most 30 bytes; see :func:`encode_short`."""
    noinline()
    return encode_short(np.int64(32), np.int64(5), buffer, start, n, arrays, out, out_at)


@helper
def encode_62(buffer: Bytes, start: int, n: int, arrays: _ShortArrays, out: Ids, out_at: int) -> int:
    """Encode a pretoken of at most 62 bytes; see :func:`encode_short`."""
    noinline()
    return encode_short(np.int64(64), np.int64(6), buffer, start, n, arrays, out, out_at)


@inlined
def enqueue(state: EncoderState, place: int, rank: int) -> None:
    """Set the rank of the merge at a place; if there is a merge, insert the place into the list of its rank.

    A place nearly always belongs at the end of its list, so search from the end. Blocks are short, which bounds the
    rest.
    """
    queue, following, previous = state.queue, state.work.following, state.work.previous
    write(state.work.ranks, place, rank)
    if rank == NO_RANK:
        return
    before, after = read(queue.tails, rank), np.int32(-1)
    while before > place:
        after, before = before, read(previous, before)
    write(previous, place, before)
    write(following, place, after)
    if before >= 0:
        write(following, before, np.int32(place))
    else:
        write(queue.heads, rank, np.int32(place))
    if after >= 0:
        write(previous, after, np.int32(place))
    else:
        write(queue.tails, rank, np.int32(place))
    if before < 0 and after < 0:
        word = rank >> 6
        write(queue.bits, word, read(queue.bits, word) | ONE << np.uint64(rank & 63))
        write(queue.summary, word >> 6, read(queue.summary, word >> 6) | ONE << np.uint64(word & 63))


@inlined
def dequeue(state: EncoderState, place: int) -> None:
    """Remove a place from the list of its rank, if there is a merge at it."""
    queue, following, previous = state.queue, state.work.following, state.work.previous
    rank = read(state.work.ranks, place)
    if rank == NO_RANK:
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
        bits = read(queue.bits, word) & ~(ONE << np.uint64(rank & 63))
        write(queue.bits, word, bits)
        if bits == 0:
            write(queue.summary, word >> 6, read(queue.summary, word >> 6) & ~(ONE << np.uint64(word & 63)))


@helper
def merge_block(state: EncoderState, buffer: Bytes, start: int, n: int) -> None:
    """Merge ``n`` bytes; each node is then in ``work.nodes`` at its first and last byte.

    The lists are emptied in order of rank, and each list is in the order of the text. If each part of a merge is made
    by one merge of an earlier rank, as in a trained vocabulary, this takes time linear in ``n``. In that of Llama 3, a
    merge may make one of an earlier rank possible, which then comes next.
    """
    merges, queue, work = state.merges, state.queue, state.work
    nodes, lengths = work.nodes, merges.lengths
    for i in range(n):
        write(nodes, i, np.int32(read(buffer, start + i)))
    for i in range(n - 1):
        enqueue(state, i, byte_pair_rank(merges.byte_pairs, buffer, start + i))
    write(work.ranks, n - 1, NO_RANK)
    group = np.int64(0)
    while group < len(queue.summary):
        summary = read(queue.summary, group)
        if summary == 0:
            group += 1
            continue
        word = group << 6 | first_bit(summary)
        rank = word << 6 | first_bit(read(queue.bits, word))
        merged = 256 + rank
        length, earliest = np.int64(read(lengths, merged)), np.int64(rank)
        while earliest == rank and read(queue.heads, rank) >= 0:
            place = np.int64(read(queue.heads, rank))
            dequeue(state, place)
            dequeue(state, place + read(lengths, np.int64(read(nodes, place))))
            write(nodes, place, np.int32(merged))
            write(nodes, place + length - 1, np.int32(merged))
            if place > 0:
                left = np.int64(read(nodes, place - 1))
                before = place - read(lengths, left)
                dequeue(state, before)
                rank_before = np.int64(pair_rank(merges.pairs, merges.filter, merges.parts, left, merged))
                enqueue(state, before, rank_before)
                earliest = min(earliest, rank_before)
            after = place + length
            write(work.ranks, place, NO_RANK)
            if after < n:
                right = np.int64(read(nodes, after))
                rank_here = np.int64(pair_rank(merges.pairs, merges.filter, merges.parts, merged, right))
                enqueue(state, place, rank_here)
                earliest = min(earliest, rank_here)
        group = earliest >> 12


@helper
def encode_long(state: EncoderState, buffer: Bytes, start: int, n: int, out: Ids, out_at: int) -> int:
    """Encode a pretoken of any length to ``out[out_at:]``; return the number of ids.

    Works in blocks that stay in the CPU's cache. The tokens are correct if each pair of neighbors, encoded alone, gives
    the same two tokens. A merge across their border would show up in that test. So each block starts with the last
    tokens before it, and with more of them until the first border passes the test.
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
