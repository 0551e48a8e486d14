"""BPE training: merge the most frequent pair of tokens, repeatedly.

The reference recounts all pairs before every merge (``naive_merges`` in the tests). Here each pair is in the heap once,
and moves down when it reaches the top with a count that has fallen since.
"""

import numpy as np

from lm.kernels.bpe.corpus import count_and_end_at
from lm.kernels.bpe.frequent_pairs import with_room_for_places
from lm.kernels.bpe.training_state import Training, add_pair, heap_entry, heap_replace_top, parts_of, table_index
from lm.kernels.jit import OK, PLACES_FULL, TABLE_FULL, Ids, Int32s, UInt32s, helper, inlined, kernel
from lm.kernels.simd import prefetch, read, write

_NO_PLACE = 2**32 - 1
_PREFETCH_PLACES = 16  # how many places ahead to prefetch their ids


def make_room_for_places(training: Training, threshold: int) -> Training:
    """Return the same state without places that no merge will use, and with a larger array if few are free then."""
    remove_unused_places(training, threshold)
    used, best = int(training.sizes["places"][0]), int(training.pairs.heap[0, 1])
    first, end = training.pairs.starts[best : best + 2].tolist()
    needed = used + 2 * (end - first) + used // 8  # a merge adds up to two places for each one that it uses
    return training if needed <= len(training.pairs.places) else with_room_for_places(training, needed)


@kernel
def remove_unused_places(training: Training, threshold: int) -> None:
    """Keep only the places at which a pair that may still be merged lies."""
    pairs, ids, lengths, sizes = training.pairs, training.corpus.ids, training.tokens.lengths, training.sizes[0]
    kept, start = np.int64(0), np.int64(0)
    for pair in range(sizes.pairs):
        end = read(pairs.starts, pair + 1)
        if read(pairs.counts, pair) >= threshold:
            left, right = parts_of(pairs, pair)
            length = np.int64(read(lengths, left))
            for i in range(start, end):
                prefetch_ahead(ids, pairs.places, i, end)
                position = np.int64(read(pairs.places, i))
                if read(ids, position) == left and read(ids, position + length) == right:
                    write(pairs.places, kept, np.uint32(position))
                    kept += 1
        write(pairs.starts, pair + 1, kept)
        start = end
    sizes.places = kept


@inlined
def prefetch_ahead(ids: Ids, places: UInt32s, i: int, end: int) -> None:
    """Prefetch the ids at a later place: which of them a merge has changed is hard to predict, and memory is slow."""
    if i + _PREFETCH_PLACES < end:
        prefetch(ids, np.int64(read(places, i + _PREFETCH_PLACES)))


@inlined
def append_touched(training: Training, row: int, token: int) -> None:
    """Append a token to a row of ``Tokens.touched``."""
    tokens, sizes = training.tokens, training.touched_sizes
    size = read(sizes, row)
    write(tokens.touched, row * len(tokens.lengths) + size, np.int32(token))
    write(sizes, row, size + 1)


@helper
def merge_pair(training: Training, best: int, threshold: int) -> None:
    """Replace a pair by a new token everywhere, and update the pairs around it.

    Side 0 is the token before the new one, side 1 the token after it.
    """
    corpus, tokens, pairs, sizes = training.corpus, training.tokens, training.pairs, training.sizes[0]
    ids, lengths, touched, places = corpus.ids, tokens.lengths, tokens.touched, pairs.places
    added_counts, added_places, removed_counts = tokens.added_counts, tokens.added_places, tokens.removed_counts
    touched_sizes, row_size, boundary = training.touched_sizes, len(lengths), np.int64(read(ids, 0))
    inside = boundary + 1
    first, end = read(pairs.starts, best), read(pairs.starts, best + 1)
    new = sizes.tokens
    sizes.tokens = new + 1
    a, b = parts_of(pairs, best)
    length_a = np.int64(read(lengths, a))
    length = length_a + np.int64(read(lengths, b))
    write(lengths, new, np.int32(length))

    # Merge at all places; add up by neighbor the counts that pairs gain and lose.
    count, count_begin, count_end = np.int64(0), np.int64(0), np.int64(0)  # the places that have this count
    for i in range(first, end):
        prefetch_ahead(ids, places, i, end)
        position = np.int64(read(places, i))
        if read(ids, position) != a or read(ids, position + length_a) != b:
            write(places, i, np.uint32(_NO_PLACE))  # a part has become part of another token since
            continue
        if not count_begin <= position < count_end:
            count, count_end = count_and_end_at(corpus, position)
            count_begin = position
        write(ids, position + length_a - 1, ids.dtype.type(inside))
        write(ids, position + length_a, ids.dtype.type(inside))
        write(ids, position, ids.dtype.type(new))
        write(ids, position + length - 1, ids.dtype.type(new))
        write(tokens.places, new, np.uint32(position))
        for side in range(2):
            neighbor = np.int64(read(ids, position + length if side else position - 1))
            if neighbor == boundary:
                continue
            i_neighbor = side * row_size + neighbor
            if neighbor != new:  # else this loss was counted when the neighbor was made
                if read(removed_counts, i_neighbor) == 0:
                    append_touched(training, 2 + side, neighbor)
                write(removed_counts, i_neighbor, read(removed_counts, i_neighbor) + count)
            if side and neighbor == a and read(ids, position + length + length_a) == b:
                continue  # the next place makes it the new token, with this one as its left neighbor
            if read(added_places, i_neighbor) == 0:
                append_touched(training, side, neighbor)
            write(added_counts, i_neighbor, read(added_counts, i_neighbor) + count)
            write(added_places, i_neighbor, read(added_places, i_neighbor) + 1)
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
            if total >= threshold:
                left, right = new if side else neighbor, neighbor if side else new
                num_places = read(added_places, i_neighbor)
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
    for i in range(first, end):
        prefetch_ahead(ids, places, i, end)
        position = np.int64(read(places, i))
        if position == _NO_PLACE:
            continue
        left, right = np.int64(read(ids, position - 1)), np.int64(read(ids, position + length))
        if left != boundary:
            append_place(training, left, position - np.int64(read(lengths, left)))
        if right != boundary and right != new:
            append_place(training, row_size + right, position)
    for side in range(2):
        for i in range(read(touched_sizes, side)):
            i_neighbor = side * row_size + read(touched, side * row_size + i)
            write(added_counts, i_neighbor, np.int64(0))
            write(added_places, i_neighbor, np.int64(0))
        write(touched_sizes, side, np.int64(0))
        write(touched_sizes, 2 + side, np.int64(0))


@inlined
def append_place(training: Training, i_neighbor: int, position: int) -> None:
    """Append a place to the pair of the new token and a neighbor, if the pair is entered."""
    next_places = training.tokens.added_counts
    place = read(next_places, i_neighbor)
    if place >= 0:
        write(training.pairs.places, place, np.uint32(position))
        write(next_places, i_neighbor, place + 1)


@kernel
def learn_merges(training: Training, merges: Int32s, done: int, limit: int, threshold: int) -> tuple[int, int]:
    """Learn merges ``done`` to ``limit`` into ``merges`` (limit, 2); fewer if no pair is left.

    Returns (number of merges learned so far, status).
    """
    pairs, sizes = training.pairs, training.sizes[0]
    heap = pairs.heap
    while done < limit and sizes.heap > 0:
        heap_count, best = heap_entry(heap, 0)
        count = read(pairs.counts, best)
        is_merged = count == heap_count and count >= threshold
        if is_merged:
            num_places = read(pairs.starts, best + 1) - read(pairs.starts, best)
            max_new_pairs = 2 * (num_places if num_places < sizes.tokens else sizes.tokens)
            if sizes.pairs + max_new_pairs > len(pairs.counts):
                return done, TABLE_FULL
            if sizes.places + 2 * num_places > len(pairs.places):
                return done, PLACES_FULL
        top_count, top_pair = count, best
        if is_merged or count < threshold:  # remove the top: the last entry takes its place
            sizes.heap -= 1
            top_count, top_pair = heap_entry(heap, sizes.heap)
        heap_replace_top(training, top_count, top_pair)
        if is_merged:
            write(merges, 2 * done, read(pairs.parts, 2 * best))
            write(merges, 2 * done + 1, read(pairs.parts, 2 * best + 1))
            merge_pair(training, best, threshold)
            done += 1
    return done, OK
