"""State of BPE training: the corpus, its tokens, and their pairs in a heap and a hash table.

A pair appears only when the newer of its tokens is created. All its places are written then, side by side and in the
order of the text, and the pair's count can only fall afterwards.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.corpus import Corpus
from lm.kernels.jit import Int, Int32s, Int64s, Records, UInt32s, UInt64s, helper, inlined
from lm.kernels.simd import read, write

_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SIZES = np.dtype([(name, np.int64) for name in ("tokens", "pairs", "heap", "places")])
_FIRST_PAIR_CAPACITY = 1 << 17


class Tokens(NamedTuple):
    """Arrays by token id. The last four are 0 between merges; their rows: left neighbors of the new token, right."""

    lengths: Int32s  # in bytes
    places: UInt32s  # an entry of the corpus where the token's bytes start
    prefixes: UInt64s  # the first eight bytes, big-endian
    added_counts: Int64s  # (2, tokens): of the pair of the new token and this one
    added_places: Int64s  # (2, tokens): number of places of this pair
    removed_counts: Int64s  # (2, tokens): lost by the pair of this token and a part of the new one
    touched: Int32s  # (4, tokens): ids with added places (per side), then with removed counts


class Pairs(NamedTuple):
    """Pairs of tokens with their counts and places, a heap of pairs, and a hash table to find them."""

    parts: Int32s  # (pairs, 2)
    counts: Int64s  # (pairs,)
    starts: Int64s  # (pairs + 1,): places of pair i are places[starts[i]:starts[i + 1]]
    places: UInt32s
    heap: Int64s  # (pairs, 2): count at the time of insertion, pair
    table: Int32s  # (2 × pairs,), a power of two: pair, or -1


class Training(NamedTuple):
    """The state of BPE training."""

    corpus: Corpus
    tokens: Tokens
    pairs: Pairs
    sizes: Records  # (1,): tokens, pairs, entries of the heap, places
    touched_sizes: Int64s  # (4,): used entries in each row of ``Tokens.touched``


def make_training(corpus: Corpus, first_id: int, max_merges: int) -> Training:
    """Return the state without pairs and places; the id of the first merge is ``first_id``."""
    ids = first_id + max_merges
    tokens = Tokens(
        np.ones(ids, np.int32),
        np.zeros(ids, np.uint32),
        np.zeros(ids, np.uint64),
        np.zeros((2, ids), np.int64),
        np.zeros((2, ids), np.int64),
        np.zeros((2, ids), np.int64),
        np.zeros((4, ids), np.int32),
    )
    tokens.prefixes[:256] = np.arange(256, dtype=np.uint64) << np.uint64(56)
    pairs = Pairs(
        np.empty((_FIRST_PAIR_CAPACITY, 2), np.int32),
        np.empty(_FIRST_PAIR_CAPACITY, np.int64),
        np.zeros(_FIRST_PAIR_CAPACITY + 1, np.int64),
        np.empty(0, np.uint32),
        np.empty((_FIRST_PAIR_CAPACITY, 2), np.int64),
        np.full(2 * _FIRST_PAIR_CAPACITY, -1, np.int32),
    )
    return Training(corpus, tokens, pairs, np.array([(first_id, 0, 0, 0)], _SIZES), np.zeros(4, np.int64))


@inlined
def parts_of(pairs: Pairs, pair: int) -> tuple[Int, Int]:
    """Return the two tokens of a pair."""
    return np.int64(read(pairs.parts, 2 * pair)), np.int64(read(pairs.parts, 2 * pair + 1))


@inlined
def pair_hash(left: Int, right: Int) -> Int:
    """Return a hash of a pair of tokens."""
    mixed = (np.uint64(left) << np.uint64(32) | np.uint64(right)) * _HASH_MULTIPLIER
    return np.int64(mixed ^ mixed >> np.uint64(32))


@inlined
def table_index(pairs: Pairs, left: int, right: int) -> Int:
    """Return the entry of the hash table for a pair of tokens; it holds -1 if the pair is not known."""
    i = pair_hash(left, right) & (len(pairs.table) - 1)
    while True:
        pair = np.int64(read(pairs.table, i))
        if pair < 0 or (read(pairs.parts, 2 * pair) == left and read(pairs.parts, 2 * pair + 1) == right):
            return i
        i = (i + 1) & (len(pairs.table) - 1)


@inlined
def compare_tokens(corpus: Corpus, tokens: Tokens, a: int, b: int) -> Int:
    """Return a number below, equal to or above 0 as the bytes of token ``a`` sort before, like or after ``b``'s."""
    prefix_a, prefix_b = read(tokens.prefixes, a), read(tokens.prefixes, b)
    if prefix_a != prefix_b:
        return 1 if prefix_a > prefix_b else -1
    length_a, length_b = np.int64(read(tokens.lengths, a)), np.int64(read(tokens.lengths, b))
    place_a, place_b = np.int64(read(tokens.places, a)), np.int64(read(tokens.places, b))
    k = 8
    while k < length_a and k < length_b:
        x, y = read(corpus.data, place_a + k), read(corpus.data, place_b + k)
        if x != y:
            return 1 if x > y else -1
        k += 1
    return length_a - length_b


@inlined
def comes_first(training: Training, count: int, pair: int, other_count: int, other: int) -> bool:
    """Return whether a pair is merged before another: the more frequent, then the one with the greater bytes."""
    if count != other_count:
        return count > other_count
    corpus, tokens, parts = training.corpus, training.tokens, training.pairs.parts
    order = compare_tokens(corpus, tokens, read(parts, 2 * pair), read(parts, 2 * other))
    if order == 0:
        order = compare_tokens(corpus, tokens, read(parts, 2 * pair + 1), read(parts, 2 * other + 1))
    return order > 0


@inlined
def heap_entry(heap: Int64s, i: int) -> tuple[Int, Int]:
    """Return (count, pair)."""
    return read(heap, 2 * i), read(heap, 2 * i + 1)


@inlined
def set_heap_entry(heap: Int64s, i: int, count: int, pair: int) -> None:
    """Set an entry of the heap."""
    write(heap, 2 * i, count)
    write(heap, 2 * i + 1, pair)


@helper
def heap_push(training: Training, count: int, pair: int) -> None:
    """Add a pair to the heap."""
    heap, sizes = training.pairs.heap, training.sizes[0]
    i = sizes.heap
    sizes.heap = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        parent_count, parent_pair = heap_entry(heap, parent)
        if not comes_first(training, count, pair, parent_count, parent_pair):
            break
        set_heap_entry(heap, i, parent_count, parent_pair)
        i = parent
    set_heap_entry(heap, i, count, pair)


@helper
def heap_replace_top(training: Training, count: int, pair: int) -> None:
    """Remove the first pair of the heap and add another."""
    heap, size = training.pairs.heap, training.sizes[0].heap
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        child_count, child_pair = heap_entry(heap, child)
        if child + 1 < size:
            other_count, other_pair = heap_entry(heap, child + 1)
            if comes_first(training, other_count, other_pair, child_count, child_pair):
                child, child_count, child_pair = child + 1, other_count, other_pair
        if not comes_first(training, child_count, child_pair, count, pair):
            break
        set_heap_entry(heap, i, child_count, child_pair)
        i = child
    set_heap_entry(heap, i, count, pair)


@inlined
def add_pair(training: Training, left: int, right: int, count: int, num_places: int) -> Int:
    """Enter a new pair, with room for its places; return the index of its first place."""
    pairs, sizes = training.pairs, training.sizes[0]
    pair, first_place = sizes.pairs, sizes.places
    write(pairs.parts, 2 * pair, np.int32(left))
    write(pairs.parts, 2 * pair + 1, np.int32(right))
    write(pairs.counts, pair, count)
    write(pairs.table, table_index(pairs, left, right), np.int32(pair))
    sizes.pairs = pair + 1
    sizes.places = first_place + num_places
    write(pairs.starts, pair + 1, first_place + num_places)
    heap_push(training, count, pair)
    return first_place
