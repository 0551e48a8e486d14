"""BPE training: the most frequent pair of tokens, again and again.

The reference recounts all pairs before every merge (``tests/test_bpe.py``). Here the words lie in one array, and a
token's id stands at its first and at its last byte: its length leads from one to the other, so that neighbours are
found without links. A pair arises only while the later of its two tokens is made, in one go: hence its places are one
stretch of an array, in the order of the text, and from then on its count can only fall. So each pair is in the heap
once, and is put back with its new count where that has fallen.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.kernels import Bytes, Int, Ints, Longs, inlined, kernel

BOUNDARY = -1  # instead of a token, between words
TOKENS, PAIRS, HEAP, PLACES = 0, 1, 2, 3  # of ``used``
MOST = 2**31 - 1  # that a count in four bytes can be
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Corpus(NamedTuple):
    """Words, each followed by a boundary; the first stands after one."""

    data: npt.NDArray[np.uint8]  # (n,)
    ids: npt.NDArray[np.int32]  # (n,): of the token that begins or ends here
    counts: npt.NDArray[np.int32]  # (n,): of the word; where it is too large, -1 less its place in ``large``
    large: npt.NDArray[np.int64]


class Tokens(NamedTuple):
    """What is known of each token, by id; the arrays after ``first`` are 0 between two merges."""

    lengths: npt.NDArray[np.int32]  # in bytes
    places: npt.NDArray[np.int32]  # a place in the corpus with its bytes
    first: npt.NDArray[np.uint64]  # its first eight bytes, as one big-endian number
    gained: npt.NDArray[np.int64]  # (2, tokens): count of the new token with this one before it, after it
    gained_places: npt.NDArray[np.int32]  # (2, tokens): how many places these pairs have
    lost: npt.NDArray[np.int64]  # (2, tokens): count that the pairs with the parts of the new token lose
    touched: npt.NDArray[np.int32]  # (4, tokens): the tokens whose four entries above are not 0


class Pairs(NamedTuple):
    """Pairs of tokens, each with its count and places, a heap of them and a hash table to find them."""

    parts: npt.NDArray[np.int32]  # (pairs, 2)
    counts: npt.NDArray[np.int64]  # (pairs,)
    starts: npt.NDArray[np.int64]  # (pairs + 1,): places of pair i are places[starts[i]:starts[i + 1]]
    places: npt.NDArray[np.int32]
    heap: npt.NDArray[np.int64]  # (pairs, 2): count when it was put in, pair
    table: npt.NDArray[np.int32]  # (a power of two,): pair, or -1


@inlined
def count_at(corpus: Corpus, at: int) -> Int:
    """The count of the word that a place is in."""
    count = np.int64(corpus.counts[at])
    return corpus.large[-1 - count] if count < 0 else count


@inlined
def spot_of(pairs: Pairs, left: int, right: int) -> Int:
    """The entry of the hash table for a pair of tokens, empty where there is none."""
    mixed = (np.uint64(left) << np.uint64(32) | np.uint64(right)) * _MIX
    spot = np.int64((mixed ^ mixed >> np.uint64(32)) & np.uint64(len(pairs.table) - 1))
    while pairs.table[spot] >= 0:
        pair = pairs.table[spot]
        if pairs.parts[pair, 0] == left and pairs.parts[pair, 1] == right:
            break
        spot = (spot + 1) & (len(pairs.table) - 1)
    return spot


@inlined
def compare_tokens(corpus: Corpus, tokens: Tokens, a: int, b: int) -> Int:
    """Below, at or above 0 as the bytes of token ``a`` come before, equal or after those of ``b``."""
    if tokens.first[a] != tokens.first[b]:
        return 1 if tokens.first[a] > tokens.first[b] else -1
    length = min(tokens.lengths[a], tokens.lengths[b])
    for k in range(8, length):
        x, y = corpus.data[tokens.places[a] + k], corpus.data[tokens.places[b] + k]
        if x != y:
            return 1 if x > y else -1
    return np.int64(tokens.lengths[a]) - np.int64(tokens.lengths[b])


@inlined
def comes_first(
    corpus: Corpus, tokens: Tokens, pairs: Pairs, count: int, pair: int, other_count: int, other: int
) -> bool:
    """Whether a pair is merged before another: the more frequent, then the greater by the bytes of its parts."""
    if count != other_count:
        return count > other_count
    order = compare_tokens(corpus, tokens, pairs.parts[pair, 0], pairs.parts[other, 0])
    if order == 0:
        order = compare_tokens(corpus, tokens, pairs.parts[pair, 1], pairs.parts[other, 1])
    return order > 0


@kernel
def push(corpus: Corpus, tokens: Tokens, pairs: Pairs, used: Longs, count: int, pair: int) -> None:
    """Put a pair into the heap."""
    heap = pairs.heap
    place = used[HEAP]
    used[HEAP] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if not comes_first(corpus, tokens, pairs, count, pair, heap[parent, 0], heap[parent, 1]):
            break
        heap[place, 0], heap[place, 1] = heap[parent, 0], heap[parent, 1]
        place = parent
    heap[place, 0], heap[place, 1] = count, pair


@kernel
def replace_first(corpus: Corpus, tokens: Tokens, pairs: Pairs, used: Longs, count: int, pair: int) -> None:
    """Put a pair in the place of the heap's first."""
    heap = pairs.heap
    place = 0
    while True:
        child = 2 * place + 1
        if child >= used[HEAP]:
            break
        if child + 1 < used[HEAP] and comes_first(
            corpus, tokens, pairs, heap[child + 1, 0], heap[child + 1, 1], heap[child, 0], heap[child, 1]
        ):
            child += 1
        if not comes_first(corpus, tokens, pairs, heap[child, 0], heap[child, 1], count, pair):
            break
        heap[place, 0], heap[place, 1] = heap[child, 0], heap[child, 1]
        place = child
    heap[place, 0], heap[place, 1] = count, pair


@kernel
def pop(corpus: Corpus, tokens: Tokens, pairs: Pairs, used: Longs) -> None:
    """Take the first pair out of the heap."""
    used[HEAP] -= 1
    last = used[HEAP]
    if last > 0:
        replace_first(corpus, tokens, pairs, used, pairs.heap[last, 0], pairs.heap[last, 1])


@inlined
def add_pair(pairs: Pairs, used: Longs, left: int, right: int, count: int, places: int) -> int:
    """A new pair with room for its places; returns it."""
    pair = used[PAIRS]
    pairs.parts[pair, 0], pairs.parts[pair, 1] = left, right
    pairs.counts[pair] = count
    pairs.table[spot_of(pairs, left, right)] = pair
    used[PAIRS] += 1
    used[PLACES] += places
    pairs.starts[pair + 1] = used[PLACES]
    return pair


@kernel
def lay_out(words: Bytes, ends: Ints, word_counts: Longs, corpus: Corpus) -> int:
    """Put the words, joined in ``words`` and ending at ``ends`` (the first entry is 0), into a corpus. A word's first
    place is one after the boundary before it; words of one byte, which have no pair, are left out. Returns its length.
    """
    corpus.ids[0] = BOUNDARY
    at, large = 1, 0
    for row in range(len(word_counts)):
        begin, end = np.int64(ends[row]), np.int64(ends[row + 1])
        if end - begin < 2:
            continue
        count = word_counts[row]
        if count > MOST:
            corpus.large[large] = count
            large += 1
            count = -large
        for k in range(begin, end):
            corpus.data[at] = words[k]
            corpus.ids[at] = words[k]
            corpus.counts[at] = count
            at += 1
        corpus.ids[at] = BOUNDARY
        at += 1
    return at


@kernel
def first_pairs(
    corpus: Corpus,
    length: int,
    tokens: Tokens,
    pairs: Pairs,
    used: Longs,
    numbers: Longs,
    totals: Longs,
    min_frequency: int,
) -> None:
    """Enter the pairs of bytes. ``numbers`` and ``totals`` (int64, 65,536, zeros) are scratch."""
    ids = corpus.ids
    for at in range(1, length - 1):
        if ids[at] >= 0:
            tokens.places[ids[at]] = at
            if ids[at + 1] >= 0:
                pair = ids[at] << 8 | ids[at + 1]
                numbers[pair] += 1
                totals[pair] += count_at(corpus, at)
    pairs.starts[0] = 0
    for both in range(65536):
        if totals[both] >= min_frequency:
            pair = add_pair(pairs, used, both >> 8, both & 255, totals[both], numbers[both])
            numbers[both] = pairs.starts[pair]
            push(corpus, tokens, pairs, used, totals[both], pair)
        else:
            numbers[both] = -1
    for at in range(1, length - 1):
        if ids[at] >= 0 and ids[at + 1] >= 0:
            both = ids[at] << 8 | ids[at + 1]
            if numbers[both] >= 0:
                pairs.places[numbers[both]] = at
                numbers[both] += 1


@inlined
def touch(tokens: Tokens, kinds: Longs, kind: int, token: int) -> None:
    """Note that an entry of a token is not 0 any more."""
    tokens.touched[kind, kinds[kind]] = token
    kinds[kind] += 1


@kernel
def merge_pair(
    corpus: Corpus, tokens: Tokens, pairs: Pairs, used: Longs, best: int, events: Ints, kinds: Longs, min_frequency: int
) -> None:
    """Make a new token of a pair, wherever it stands, and bring the pairs around up to date.

    ``events`` (int32, two for each place of the pair at least, three columns): side, neighbour, place. ``kinds``
    (int64, 4, zeros): how many entries of ``tokens.touched`` are in use.
    """
    ids = corpus.ids
    gained, gained_places, lost = tokens.gained, tokens.gained_places, tokens.lost
    new = np.int32(used[TOKENS])
    used[TOKENS] += 1
    a, b = pairs.parts[best, 0], pairs.parts[best, 1]
    length_a = np.int64(tokens.lengths[a])
    length = length_a + np.int64(tokens.lengths[b])
    tokens.lengths[new] = length
    number = 0
    for i in range(pairs.starts[best], pairs.starts[best + 1]):
        at = np.int64(pairs.places[i])
        if ids[at] != a or ids[at + length_a] != b:
            continue  # a part has become part of another token since
        count = count_at(corpus, at)
        ids[at + length_a - 1] = ids[at + length_a] = BOUNDARY - 1  # inside a token
        ids[at] = ids[at + length - 1] = new
        tokens.places[new] = at
        before, after = ids[at - 1], ids[at + length]
        if before >= 0:
            if before == new:  # made a moment ago, with this place's first part as its neighbour then
                gained[1, a] -= count
            else:
                if lost[0, before] == 0:
                    touch(tokens, kinds, 2, before)
                lost[0, before] += count
            if gained_places[0, before] == 0:
                touch(tokens, kinds, 0, before)
            gained[0, before] += count
            gained_places[0, before] += 1
            events[number, 0], events[number, 1], events[number, 2] = 0, before, at - tokens.lengths[before]
            number += 1
        if after >= 0:
            if lost[1, after] == 0:
                touch(tokens, kinds, 3, after)
            lost[1, after] += count
            if gained_places[1, after] == 0:
                touch(tokens, kinds, 1, after)
            gained[1, after] += count
            gained_places[1, after] += 1
            events[number, 0], events[number, 1], events[number, 2] = 1, after, at
            number += 1
    first = np.uint64(0)
    for k in range(8):
        first = first << np.uint64(8) | np.uint64(corpus.data[tokens.places[new] + k] if k < length else 0)
    tokens.first[new] = first
    pairs.counts[best] = 0

    for side in range(2):
        for i in range(kinds[side]):
            other = tokens.touched[side, i]
            left, right = (other, new) if side == 0 else (new, other)
            total = gained[side, other]
            gained[side, other] = -1
            if total >= min_frequency:
                pair = add_pair(pairs, used, left, right, total, gained_places[side, other])
                push(corpus, tokens, pairs, used, total, pair)
                gained[side, other] = pairs.starts[pair]
        for i in range(kinds[2 + side]):
            other = tokens.touched[2 + side, i]
            left, right = (other, a) if side == 0 else (b, other)
            pair = pairs.table[spot_of(pairs, left, right)]
            if pair >= 0 and pair != best:
                pairs.counts[pair] -= lost[side, other]
            lost[side, other] = 0
    for i in range(number):
        side, other = events[i, 0], events[i, 1]
        if gained[side, other] >= 0:
            pairs.places[gained[side, other]] = events[i, 2]
            gained[side, other] += 1
    for side in range(2):
        for i in range(kinds[side]):
            other = tokens.touched[side, i]
            gained[side, other] = gained_places[side, other] = 0
    kinds[:] = 0


@kernel
def learn(
    corpus: Corpus,
    tokens: Tokens,
    pairs: Pairs,
    used: Longs,
    events: Ints,
    kinds: Longs,
    merges: Ints,
    done: int,
    limit: int,
    min_frequency: int,
) -> int:
    """Learn merges ``done`` to ``limit`` into ``merges`` (int32, (limit, 2)), fewer when no pair is left.

    Returns how many are learned then; where the table of pairs must grow to go on, -1 less that number.
    """
    while done < limit and used[HEAP] > 0:
        count, best = pairs.heap[0, 0], pairs.heap[0, 1]
        now = pairs.counts[best]
        if now < min_frequency:
            pop(corpus, tokens, pairs, used)
        elif now != count:
            replace_first(corpus, tokens, pairs, used, now, best)
        else:
            around = 2 * min(used[TOKENS], pairs.starts[best + 1] - pairs.starts[best])
            if 2 * (used[PAIRS] + around) > len(pairs.table):
                return -1 - done
            pop(corpus, tokens, pairs, used)
            merges[done, 0], merges[done, 1] = pairs.parts[best, 0], pairs.parts[best, 1]
            merge_pair(corpus, tokens, pairs, used, best, events, kinds, min_frequency)
            done += 1
    return done


@kernel
def rebuild_table(pairs: Pairs, used: Longs) -> None:
    """Enter all pairs into a new, empty hash table."""
    for pair in range(used[PAIRS]):
        pairs.table[spot_of(pairs, pairs.parts[pair, 0], pairs.parts[pair, 1])] = pair
