"""BPE training: merge the most frequent pair of tokens, repeatedly.

The reference recounts all pairs before every merge (``naive_merges`` in the tests). Here each pair is in the heap once,
and moves down when it reaches the top with a count that has fallen since.
"""

import numpy as np

from lm.kernels.bpe.training_state import (
    Corpus,
    Training,
    add_pair,
    count_at,
    heap_entry,
    heap_replace_top,
    make_training,
    parts_of,
    table_index,
)
from lm.kernels.jit import Bytes, Int32s, Int64s, helper, inlined, kernel
from lm.kernels.simd import read, write
from lm.kernels.status import OK, TABLE_FULL

_MAX_INT32 = 2**31 - 1
_BOUNDARY = -1  # in place of a token, between pretokens
_INSIDE = -2  # in place of a token, inside a token


def make_corpus(pretokens: Bytes, ends: Int32s, counts: Int64s) -> tuple[Corpus, int]:
    """Return (corpus, its length) of concatenated pretokens, which end at ``ends`` after a first entry 0."""
    size = len(pretokens) + len(ends) + 2
    large_counts = np.empty(np.count_nonzero(counts > _MAX_INT32), np.int64)
    corpus = Corpus(np.empty(size, np.uint8), np.empty(size, np.int32), np.empty(size, np.int32), large_counts)
    return corpus, fill_corpus(pretokens, ends, counts, corpus)


def start_training(corpus: Corpus, length: int, first_id: int, max_merges: int, min_frequency: int) -> Training:
    """Return the state before the first merge, whose token id is ``first_id``."""
    training = make_training(corpus, length, first_id, max_merges)
    place_counts, total_counts = np.zeros((2, 1 << 16), np.int64)
    enter_byte_pairs(training, length, place_counts, total_counts, min_frequency)
    return training


def grow_pair_table(training: Training) -> Training:
    """Return the same state with a hash table of twice the size."""
    pairs = training.pairs._replace(table=np.full(2 * len(training.pairs.table), -1, np.int32))
    training = training._replace(pairs=pairs)
    rebuild_table(training)
    return training


@kernel
def fill_corpus(pretokens: Bytes, ends: Int32s, counts: Int64s, corpus: Corpus) -> int:
    """Copy the pretokens into the corpus; return its length. One-byte pretokens have no pair and are left out."""
    ids = corpus.ids
    write(ids, 0, np.int32(_BOUNDARY))
    position, num_large = 1, 0
    for row in range(len(counts)):
        begin, end = np.int64(read(ends, row)), np.int64(read(ends, row + 1))
        if end - begin < 2:
            continue
        count = read(counts, row)
        if count > _MAX_INT32:
            write(corpus.large_counts, num_large, count)
            num_large += 1
            count = -num_large
        for k in range(begin, end):
            byte = read(pretokens, k)
            write(corpus.data, position, byte)
            write(ids, position, np.int32(byte))
            write(corpus.counts, position, np.int32(count))
            position += 1
        write(ids, position, np.int32(_BOUNDARY))
        position += 1
    return position


@kernel
def enter_byte_pairs(
    training: Training, length: int, place_counts: Int64s, total_counts: Int64s, min_frequency: int
) -> None:
    """Enter all pairs of bytes. Scratch, zeros, by pair of bytes: ``place_counts`` and ``total_counts`` (65536,)."""
    corpus, tokens, pairs = training.corpus, training.tokens, training.pairs
    ids = corpus.ids
    for position in range(1, length - 1):
        left, right = np.int64(read(ids, position)), np.int64(read(ids, position + 1))
        if left >= 0:
            write(tokens.places, left, np.int32(position))
            if right >= 0:
                i = left << 8 | right
                write(place_counts, i, read(place_counts, i) + 1)
                write(total_counts, i, read(total_counts, i) + count_at(corpus, position))
    write(pairs.starts, 0, np.int64(0))
    next_places = place_counts
    for both in range(65536):
        total = read(total_counts, both)
        if total >= min_frequency:
            write(next_places, both, add_pair(training, both >> 8, both & 255, total, read(place_counts, both)))
        else:
            write(next_places, both, np.int64(-1))
    for position in range(1, length - 1):
        left, right = np.int64(read(ids, position)), np.int64(read(ids, position + 1))
        if left >= 0 and right >= 0:
            i = left << 8 | right
            place = read(next_places, i)
            if place >= 0:
                write(pairs.places, place, np.int32(position))
                write(next_places, i, place + 1)


@inlined
def append_touched(training: Training, row: int, token: int) -> None:
    """Append a token to a row of ``Tokens.touched``."""
    tokens, sizes = training.tokens, training.touched_sizes
    size = read(sizes, row)
    write(tokens.touched, row * len(tokens.lengths) + size, np.int32(token))
    write(sizes, row, size + 1)


@helper
def merge_pair(training: Training, best: int, min_frequency: int) -> None:
    """Replace a pair by a new token everywhere, and update the pairs around it.

    Side 0 is the token before the new one, side 1 the token after it.
    """
    corpus, tokens, pairs, sizes = training.corpus, training.tokens, training.pairs, training.sizes[0]
    ids, lengths, touched, starts = corpus.ids, tokens.lengths, tokens.touched, pairs.starts
    added_counts, added_places, removed_counts = tokens.added_counts, tokens.added_places, tokens.removed_counts
    events, touched_sizes = training.events, training.touched_sizes
    row_size = len(lengths)
    new = sizes.tokens
    sizes.tokens = new + 1
    a, b = parts_of(pairs, best)
    length_a = np.int64(read(lengths, a))
    length = length_a + np.int64(read(lengths, b))
    write(lengths, new, np.int32(length))

    # Merge at all places; add up by neighbor the counts that pairs gain and lose.
    num_events = 0
    for i in range(read(starts, best), read(starts, best + 1)):
        position = np.int64(read(pairs.places, i))
        if read(ids, position) != a or read(ids, position + length_a) != b:
            continue  # a part has become part of another token since
        count = count_at(corpus, position)
        write(ids, position + length_a - 1, np.int32(_INSIDE))
        write(ids, position + length_a, np.int32(_INSIDE))
        write(ids, position, np.int32(new))
        write(ids, position + length - 1, np.int32(new))
        write(tokens.places, new, np.int32(position))
        for side in range(2):
            neighbor = np.int64(read(ids, position + length if side else position - 1))
            if neighbor < 0:
                continue
            i_neighbor = side * row_size + neighbor
            if neighbor == new:  # merged just before, with part a of this place as its right neighbor
                write(added_counts, row_size + a, read(added_counts, row_size + a) - count)
            else:
                if read(removed_counts, i_neighbor) == 0:
                    append_touched(training, 2 + side, neighbor)
                write(removed_counts, i_neighbor, read(removed_counts, i_neighbor) + count)
            if read(added_places, i_neighbor) == 0:
                append_touched(training, side, neighbor)
            write(added_counts, i_neighbor, read(added_counts, i_neighbor) + count)
            write(added_places, i_neighbor, np.int32(read(added_places, i_neighbor) + 1))
            write(events, 3 * num_events, np.int32(side))
            write(events, 3 * num_events + 1, np.int32(neighbor))
            start = position if side else position - read(lengths, neighbor)
            write(events, 3 * num_events + 2, np.int32(start))
            num_events += 1
    prefix = np.uint64(0)
    place = np.int64(read(tokens.places, new))
    for k in range(8):
        prefix = prefix << np.uint64(8) | np.uint64(read(corpus.data, place + k) if k < length else 0)
    write(tokens.prefixes, new, prefix)
    write(pairs.counts, best, np.int64(0))

    # Enter the new pairs; ``added_counts`` now holds the index of their next place. Lower the counts of old pairs.
    next_places = added_counts
    for side in range(2):
        for i in range(read(touched_sizes, side)):
            neighbor = np.int64(read(touched, side * row_size + i))
            i_neighbor = side * row_size + neighbor
            total = read(added_counts, i_neighbor)
            write(next_places, i_neighbor, np.int64(-1))
            if total >= min_frequency:
                left, right = new if side else neighbor, neighbor if side else new
                num_places = np.int64(read(added_places, i_neighbor))
                write(next_places, i_neighbor, add_pair(training, left, right, total, num_places))
        for i in range(read(touched_sizes, 2 + side)):
            neighbor = np.int64(read(touched, (2 + side) * row_size + i))
            i_neighbor = side * row_size + neighbor
            left, right = b if side else neighbor, neighbor if side else a
            pair = np.int64(read(pairs.table, table_index(pairs, left, right)))
            if pair >= 0 and pair != best:
                write(pairs.counts, pair, read(pairs.counts, pair) - read(removed_counts, i_neighbor))
            write(removed_counts, i_neighbor, np.int64(0))

    # Write the places of the new pairs, then reset the arrays.
    for i in range(num_events):
        i_neighbor = read(events, 3 * i) * row_size + read(events, 3 * i + 1)
        place = read(next_places, i_neighbor)
        if place >= 0:
            write(pairs.places, place, read(events, 3 * i + 2))
            write(next_places, i_neighbor, place + 1)
    for side in range(2):
        for i in range(read(touched_sizes, side)):
            i_neighbor = side * row_size + read(touched, side * row_size + i)
            write(added_counts, i_neighbor, np.int64(0))
            write(added_places, i_neighbor, np.int32(0))
        write(touched_sizes, side, np.int64(0))
        write(touched_sizes, 2 + side, np.int64(0))


@kernel
def learn_merges(training: Training, merges: Int32s, done: int, limit: int, min_frequency: int) -> tuple[int, int]:
    """Learn merges ``done`` to ``limit`` into ``merges`` (limit, 2); fewer if no pair is left.

    Returns (number of merges learned so far, status).
    """
    pairs, sizes = training.pairs, training.sizes[0]
    heap = pairs.heap
    while done < limit and sizes.heap > 0:
        heap_count, best = heap_entry(heap, 0)
        count = read(pairs.counts, best)
        is_merged = count == heap_count and count >= min_frequency
        if is_merged:
            num_places = read(pairs.starts, best + 1) - read(pairs.starts, best)
            max_new_pairs = 2 * (num_places if num_places < sizes.tokens else sizes.tokens)
            if 2 * (sizes.pairs + max_new_pairs) > len(pairs.table):
                return done, TABLE_FULL
        top_count, top_pair = count, best
        if is_merged or count < min_frequency:  # remove the top: the last entry takes its place
            sizes.heap -= 1
            top_count, top_pair = heap_entry(heap, sizes.heap)
        heap_replace_top(training, top_count, top_pair)
        if is_merged:
            write(merges, 2 * done, read(pairs.parts, 2 * best))
            write(merges, 2 * done + 1, read(pairs.parts, 2 * best + 1))
            merge_pair(training, best, min_frequency)
            done += 1
    return done, OK


@kernel
def rebuild_table(training: Training) -> None:
    """Enter all pairs into a new, empty hash table."""
    pairs = training.pairs
    for pair in range(training.sizes[0].pairs):
        left, right = parts_of(pairs, pair)
        write(pairs.table, table_index(pairs, left, right), np.int32(pair))
