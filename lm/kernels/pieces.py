"""Encoding by SentencePiece's models: a trie of pieces, and the best pieces of a text by BPE or by a unigram model.

Texts and pieces are code points. The reference is :mod:`lm.tokenizer.piece_reference`. Sources: Kudo 2018 (unigram);
Kudo and Richardson 2018 (SentencePiece).
"""

import numpy as np

from lm.kernels.jit import Floats, Int, Int32s, Int64s, UInt64s, helper, kernel
from lm.kernels.simd import read, write

GONE = -2
"""A symbol that was merged into the one before it."""
_MIX, _TAKEN = np.uint64(0x9E3779B97F4A7C15), np.uint64(1 << 63)
_POINT_BITS, _HALF = np.uint64(21), np.uint64(32)
_LEFT_BITS = 32
_LOWEST = np.float32(-(1 << 19))  # sum of scores, from which on they are counted from 0 again


@helper
def _find_slot(keys: UInt64s, key: np.uint64) -> Int:
    """Return the slot of a key in an open hash table of 2^n slots, or the empty slot where it belongs."""
    mask = np.int64(len(keys) - 1)
    slot = np.int64((key * _MIX) >> _HALF) & mask
    while read(keys, slot) != np.uint64(0) and read(keys, slot) != key:
        slot = (slot + 1) & mask
    return slot


@helper
def _edge(node: Int, point: Int) -> np.uint64:
    return _TAKEN | (np.uint64(node) << _POINT_BITS) | np.uint64(point)


@helper
def _pair(left: Int, right: Int) -> np.uint64:
    return _TAKEN | (np.uint64(left) << _HALF) | np.uint64(right)


@helper
def _walk(points: Int32s, start: Int, end: Int, keys: UInt64s, children: Int32s, values: Int32s) -> Int:
    """Return the value of the node of ``points[start:end]``; -1 if there is none."""
    node = np.int64(0)
    for k in range(start, end):
        slot = _find_slot(keys, _edge(node, np.int64(read(points, k))))
        if read(keys, slot) == np.uint64(0):
            return -1
        node = np.int64(read(children, slot))
    return np.int64(read(values, node))


@kernel
def build_trie(points: Int32s, starts: Int64s, ids: Int32s, keys: UInt64s, children: Int32s, values: Int32s) -> Int:
    """Enter P pieces, ``points[starts[i] : starts[i + 1]]`` with the id ``ids[i]``, into an empty trie.

    ``keys`` and ``children`` are its edges in a hash table, zeros, of more slots than points; ``values`` (nodes,) get
    the ids and are -1 before. Returns the number of nodes.
    """
    count = np.int64(0)
    for piece in range(len(ids)):
        node = np.int64(0)
        for k in range(read(starts, piece), read(starts, piece + 1)):
            key = _edge(node, np.int64(read(points, k)))
            slot = _find_slot(keys, key)
            if read(keys, slot) == np.uint64(0):
                count += 1
                write(keys, slot, key)
                write(children, slot, np.int32(count))
            node = np.int64(read(children, slot))
        write(values, node, read(ids, piece))
    return count + 1


@kernel
def build_pairs(
    points: Int32s,
    starts: Int64s,
    ids: Int32s,
    keys: UInt64s,
    children: Int32s,
    values: Int32s,
    pairs: UInt64s,
    merged: Int32s,
) -> None:
    """Enter each way to join two pieces to a third one into a hash table, ``pairs`` → ``merged``, of zeros.

    The other arguments are those of :func:`build_trie`. The table has more slots than ``points``.
    """
    for piece in range(len(ids)):
        start, end = read(starts, piece), read(starts, piece + 1)
        for middle in range(start + 1, end):
            left = _walk(points, start, middle, keys, children, values)
            if left < 0:
                continue
            right = _walk(points, middle, end, keys, children, values)
            if right >= 0:
                slot = _find_slot(pairs, _pair(left, right))
                write(pairs, slot, _pair(left, right))
                write(merged, slot, read(ids, piece))


@kernel
def encode_unigram(
    points: Int32s,
    keys: UInt64s,
    children: Int32s,
    values: Int32s,
    scores: Floats,
    longest: int,
    unknown_score: np.float32,
    best: Floats,
    origins: Int32s,
    ids: Int32s,
) -> Int:
    """Find the pieces of a text of N code points with the largest sum of scores (Viterbi), without a lattice in memory.

    Sums are float32, as in the library, which decides between equal ones. A code point that no piece of length 1 covers
    is unknown, id -1. ``scores`` (pieces,); ``longest`` is the length of the longest piece; ``best``, ``origins`` and
    ``ids`` (N + 1,) are overwritten. Returns the number of pieces n: their first code points are then
    ``origins[N + 1 - n :]``, their ids ``ids[N + 1 - n :]``.
    """
    length = len(points)
    for k in range(length + 1):
        write(origins, k, np.int32(-1))
    write(best, 0, np.float32(0))
    for start in range(length):
        before, node, has_single = read(best, start), np.int64(0), False
        if before < _LOWEST:  # only differences matter, and float32 has few digits
            for end in range(start, min(start + longest, length) + 1):
                write(best, end, np.float32(read(best, end) - before))
            before = np.float32(0)
        for end in range(start + 1, length + 1):
            slot = _find_slot(keys, _edge(node, np.int64(read(points, end - 1))))
            if read(keys, slot) == np.uint64(0):
                break
            node = np.int64(read(children, slot))
            value = np.int64(read(values, node))
            if value < 0:
                continue
            has_single = has_single or end == start + 1
            score = np.float32(read(scores, value) + before)
            if read(origins, end) < 0 or score > read(best, end):
                write(best, end, score)
                write(origins, end, np.int32(start))
                write(ids, end, np.int32(value))
        if not has_single:
            unknown = np.float32(unknown_score + before)
            if read(origins, start + 1) < 0 or unknown > read(best, start + 1):
                write(best, start + 1, unknown)
                write(origins, start + 1, np.int32(start))
                write(ids, start + 1, np.int32(-1))
    count, place = np.int64(0), np.int64(length)
    while place > 0:  # from the end, into the places behind: each piece has at least one code point
        origin, piece = np.int64(read(origins, place)), read(ids, place)
        write(origins, length - count, np.int32(origin))
        write(ids, length - count, piece)
        count += 1
        place = origin
    return count


@helper
def _push(heap: Int64s, count: Int, value: Int) -> None:
    """Enter a value into a heap of ``count`` numbers, the smallest first."""
    place = count
    while place > 0:
        parent = (place - 1) >> 1
        if read(heap, parent) <= value:
            break
        write(heap, place, read(heap, parent))
        place = parent
    write(heap, place, np.int64(value))


@helper
def _pop(heap: Int64s, count: Int) -> Int:
    """Return the smallest of ``count`` numbers, and remove it."""
    top, last, place = read(heap, 0), read(heap, count - 1), np.int64(0)
    while True:
        child = 2 * place + 1
        if child >= count - 1:
            break
        if child + 1 < count - 1 and read(heap, child + 1) < read(heap, child):
            child += 1
        if read(heap, child) >= last:
            break
        write(heap, place, read(heap, child))
        place = child
    write(heap, place, last)
    return top


@helper
def _merged_piece(symbols: Int32s, left: Int, right: Int, pairs: UInt64s, merged: Int32s) -> Int:
    """Return the piece that two symbols make; -1 if there is none."""
    first, second = np.int64(read(symbols, left)), np.int64(read(symbols, right))
    if first < 0 or second < 0:
        return -1
    slot = _find_slot(pairs, _pair(first, second))
    return np.int64(read(merged, slot)) if read(pairs, slot) != np.uint64(0) else np.int64(-1)


@kernel
def merge_pieces(
    symbols: Int32s, ranks: Int32s, pairs: UInt64s, merged: Int32s, previous: Int32s, following: Int32s, heap: Int64s
) -> None:
    """Merge N ``symbols`` in place, the pair with the piece of the lowest rank first, of equal ones the leftmost.

    Symbols below 0 are not merged. A symbol that is merged into the one before becomes :data:`GONE`. ``ranks``
    (pieces,); ``previous``, ``following`` (N,) and ``heap`` (3 N,) are overwritten.
    """
    length, count = len(symbols), np.int64(0)
    for k in range(length):
        write(previous, k, np.int32(k - 1))
        write(following, k, np.int32(k + 1 if k + 1 < length else -1))
        if k + 1 < length:
            piece = _merged_piece(symbols, k, k + 1, pairs, merged)
            if piece >= 0:
                _push(heap, count, (np.int64(read(ranks, piece)) << _LEFT_BITS) | k)
                count += 1
    while count > 0:
        top = _pop(heap, count)
        count -= 1
        left = top & 0xFFFFFFFF
        right = np.int64(read(following, left))
        if read(symbols, left) == GONE or right < 0:
            continue
        piece = _merged_piece(symbols, left, right, pairs, merged)
        if piece < 0 or np.int64(read(ranks, piece)) != top >> _LEFT_BITS:  # a part has been merged meanwhile
            continue
        after, before = np.int64(read(following, right)), np.int64(read(previous, left))
        write(symbols, left, np.int32(piece))
        write(symbols, right, np.int32(GONE))
        write(following, left, np.int32(after))
        if after >= 0:
            write(previous, after, np.int32(left))
            piece = _merged_piece(symbols, left, after, pairs, merged)
            if piece >= 0:
                _push(heap, count, (np.int64(read(ranks, piece)) << _LEFT_BITS) | left)
                count += 1
        if before >= 0:
            piece = _merged_piece(symbols, before, left, pairs, merged)
            if piece >= 0:
                _push(heap, count, (np.int64(read(ranks, piece)) << _LEFT_BITS) | before)
                count += 1
