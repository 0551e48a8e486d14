"""The frequent pairs of a corpus: found by a pass over all its tokens, at the start of training and now and then later.

A pair's count only falls. So pairs below a threshold are not merged while there is a pair above it, and take no memory.
When all pairs above the threshold are merged, another pass finds those above a lower one.
"""

import numpy as np

from lm.kernels.bpe.corpus import ENTRIES_PER_PRETOKEN, count_and_end_at
from lm.kernels.bpe.training_state import Training, heap_push, pair_hash, parts_of, table_index
from lm.kernels.jit import OK, TABLE_FULL, Int, Int64s, inlined, kernel
from lm.kernels.simd import read, write


def find_pairs(training: Training, length: int, threshold: int) -> Training:
    """Return the state with all pairs that occur ``threshold`` times or more, and no others.

    ``length`` is the number of entries of the corpus.
    """
    pairs, sizes = training.pairs, training.sizes
    for name in ("pairs", "heap", "places"):
        sizes[name] = 0
    pairs.table[:] = -1
    # The sum of a bucket is at least the count of each of its pairs.
    bits = min(max(2 * int(sizes["tokens"][0]).bit_length() - 2, 16), 24)
    buckets = np.zeros(1 << bits, np.int64)
    add_to_buckets(training, length, buckets)
    position, status = count_pairs(training, length, buckets, threshold, 1)
    while status == TABLE_FULL:
        training = grow_pairs(training)
        position, status = count_pairs(training, length, buckets, threshold, position)
    del buckets

    pairs = training.pairs
    num_found = int(sizes["pairs"][0])
    is_frequent = pairs.counts[:num_found] >= threshold
    num_places = pairs.starts[1 : num_found + 1][is_frequent]
    sizes["pairs"] = num_pairs = len(num_places)
    pairs.parts[:num_pairs] = pairs.parts[:num_found][is_frequent]
    pairs.counts[:num_pairs] = pairs.counts[:num_found][is_frequent]
    pairs.starts[0] = 0
    pairs.starts[1 : num_pairs + 1] = np.cumsum(num_places)
    total_places = int(num_places.sum())
    if total_places > len(pairs.places):  # at the start; later there are fewer tokens and so fewer places
        training = with_room_for_places(training, total_places + total_places // 8)
    sizes["places"] = total_places
    pairs.table[:] = -1
    rebuild_table(training)
    enter_places(training, length, pairs.starts[:num_pairs].copy())
    return training


def grow_pairs(training: Training) -> Training:
    """Return the same state with room for twice as many pairs."""
    old, size = training.pairs, len(training.pairs.counts)
    pairs = old._replace(
        parts=np.concatenate([old.parts, np.empty_like(old.parts)]),
        counts=np.concatenate([old.counts, np.empty_like(old.counts)]),
        starts=np.concatenate([old.starts, np.empty(size, np.int64)]),
        heap=np.concatenate([old.heap, np.empty_like(old.heap)]),
        table=np.full(2 * len(old.table), -1, np.int32),
    )
    training = training._replace(pairs=pairs)
    rebuild_table(training)
    return training


def with_room_for_places(training: Training, num_places: int) -> Training:
    """Return the same state with an array for ``num_places`` places."""
    used, places = int(training.sizes["places"][0]), np.empty(num_places, np.uint32)
    places[:used] = training.pairs.places[:used]
    return training._replace(pairs=training.pairs._replace(places=places))


@inlined
def next_position(training: Training, position: Int) -> Int:
    """Return the position of the token after the one at ``position``, if both are in one pretoken; else 0."""
    following = position + np.int64(read(training.tokens.lengths, np.int64(read(training.corpus.ids, position))))
    return 0 if read(training.corpus.ids, following) == read(training.corpus.ids, 0) else following


@inlined
def next_pretoken(training: Training, position: Int) -> Int:
    """Return the position of the pretoken after the one whose last token is at ``position``."""
    length = np.int64(read(training.tokens.lengths, np.int64(read(training.corpus.ids, position))))
    return position + length + ENTRIES_PER_PRETOKEN


@kernel
def add_to_buckets(training: Training, length: int, buckets: Int64s) -> None:
    """Add the count of each pair to its bucket, by the hash of the pair; their number is a power of two."""
    ids, position = training.corpus.ids, np.int64(1)
    while position < length:
        count, _ = count_and_end_at(training.corpus, position)
        following = next_position(training, position)
        while following:
            bucket = pair_hash(read(ids, position), read(ids, following)) & (len(buckets) - 1)
            write(buckets, bucket, read(buckets, bucket) + count)
            position, following = following, next_position(training, following)
        position = next_pretoken(training, position)


@kernel
def count_pairs(training: Training, length: int, buckets: Int64s, threshold: int, position: Int) -> tuple[Int, int]:
    """Count the pairs in buckets of ``threshold`` or more, from ``position`` on; ``starts[i + 1]`` counts the places.

    Returns (position, status).
    """
    ids, pairs, sizes = training.corpus.ids, training.pairs, training.sizes[0]
    while position < length:
        count, _ = count_and_end_at(training.corpus, position)
        following = next_position(training, position)
        while following:
            left, right = np.int64(read(ids, position)), np.int64(read(ids, following))
            if read(buckets, pair_hash(left, right) & (len(buckets) - 1)) >= threshold:
                i = table_index(pairs, left, right)
                pair = np.int64(read(pairs.table, i))
                if pair < 0:
                    pair = sizes.pairs
                    if pair == len(pairs.counts):
                        return position, TABLE_FULL
                    sizes.pairs = pair + 1
                    write(pairs.table, i, np.int32(pair))
                    write(pairs.parts, 2 * pair, np.int32(left))
                    write(pairs.parts, 2 * pair + 1, np.int32(right))
                    write(pairs.counts, pair, np.int64(0))
                    write(pairs.starts, pair + 1, np.int64(0))
                write(pairs.counts, pair, read(pairs.counts, pair) + count)
                write(pairs.starts, pair + 1, read(pairs.starts, pair + 1) + 1)
            position, following = following, next_position(training, following)
        position = next_pretoken(training, position)
    return position, OK


@kernel
def enter_places(training: Training, length: int, next_places: Int64s) -> None:
    """Write the places of all pairs and put the pairs into the heap. ``next_places``: a copy of ``starts``, changed."""
    ids, pairs, position = training.corpus.ids, training.pairs, np.int64(1)
    for i in range(training.sizes[0].pairs):
        heap_push(training, read(pairs.counts, i), i)
    while position < length:
        following = next_position(training, position)
        while following:
            left, right = np.int64(read(ids, position)), np.int64(read(ids, following))
            pair = np.int64(read(pairs.table, table_index(pairs, left, right)))
            if pair >= 0:
                write(pairs.places, read(next_places, pair), np.uint32(position))
                write(next_places, pair, read(next_places, pair) + 1)
            position, following = following, next_position(training, following)
        position = next_pretoken(training, position)


@kernel
def rebuild_table(training: Training) -> None:
    """Enter all pairs into a new, empty hash table."""
    pairs = training.pairs
    for pair in range(training.sizes[0].pairs):
        left, right = parts_of(pairs, pair)
        write(pairs.table, table_index(pairs, left, right), np.int32(pair))
