"""Repeated n-grams of words: the characters of the most frequent one, and of those that occurred before.

An n-gram can only be repeated if its first n − 1 words and its last word are. So each n looks only at the places that
are left of the one before, and most documents are done after a few. Numbers stand for the words, so that comparisons
are exact. See Rae et al. 2021, section A1.1 and table A1.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.curation.item_table import mix
from lm.kernels.jit import Int, Int32s, Int64s, UInt64s, Word, helper, inlined
from lm.kernels.simd import read, write

ID_BITS = 18
MAX_WORDS = 1 << ID_BITS  # whose n-grams are counted
FIRST_TOP, FIRST_DUPLICATE, LAST_N = 2, 5, 10
_USED = np.uint64(1 << 63)


class GramWorkspace(NamedTuple):
    """Scratch arrays for up to N words; each (N,) but ``slots`` (a power of two of at least 2 N,)."""

    words: Int32s  # number of each word of the text
    word_counts: Int32s  # by number
    word_lengths: Int32s  # in characters, by number
    places: Int32s  # of n-grams that may be repeated
    grams: Int32s  # their numbers
    gram_counts: Int32s  # by number
    first_places: Int32s  # by number
    slots: UInt64s


def make_gram_workspace(words: int) -> GramWorkspace:
    """Return a workspace for texts of up to ``words`` words."""
    numbers, counts, lengths, places, grams, gram_counts, first_places = (np.empty(words, np.int32) for _ in range(7))
    slots = np.empty(4 << words.bit_length(), np.uint64)
    return GramWorkspace(numbers, counts, lengths, places, grams, gram_counts, first_places, slots)


@helper
def count_grams(work: GramWorkspace, num_words: Int, seed: Word, counts: Int64s, at: Int) -> None:
    """Write the characters of the top 2- to 4-gram, then of duplicate 5- to 10-grams, to ``counts`` from ``at``."""
    places, grams = work.places, work.grams
    num_places = 0
    for place in range(num_words):
        word = read(work.words, place)
        if read(work.word_counts, word) > 1:
            write(places, num_places, np.int32(place))
            write(grams, num_places, word)
            num_places += 1
    for n in range(FIRST_TOP, LAST_N + 1):
        num_places, num_grams = _number_grams(work, n, num_places, num_words, seed)
        if n < FIRST_DUPLICATE:
            write(counts, at, _top_characters(work, n, num_grams, num_words))
        else:
            write(counts, at, _duplicate_characters(work, n, num_places))
        at += 1
        num_places = _keep_repeated(work, num_places)


@helper
def _number_grams(work: GramWorkspace, n: int, num_places: Int, num_words: Int, seed: Word) -> tuple[Int, Int]:
    """Number the n-grams at the places of repeated (n − 1)-grams whose last word is repeated too, and count each.

    Returns the number of places left, and of different n-grams.
    """
    num_slots = np.int64(2)
    while num_slots < 2 * num_places:
        num_slots += num_slots
    for slot in range(num_slots if num_places else 0):
        write(work.slots, slot, np.uint64(0))
    mask = num_slots - 1
    left, num_grams = np.int64(0), np.int64(0)
    for i in range(num_places):
        place = np.int64(read(work.places, i))
        if place + n > num_words:
            break
        last = np.int64(read(work.words, place + n - 1))
        if read(work.word_counts, last) < 2:
            continue
        key = np.uint64(np.int64(read(work.grams, i)) << ID_BITS | last) | _USED >> np.uint64(ID_BITS)
        home = np.int64(mix(key, seed)) & mask
        entry = read(work.slots, home)
        while entry and entry >> np.uint64(ID_BITS) != key:
            home = (home + 1) & mask
            entry = read(work.slots, home)
        gram = np.int64(entry) & np.int64(MAX_WORDS - 1)
        if not entry:
            gram = num_grams
            write(work.slots, home, key << np.uint64(ID_BITS) | np.uint64(gram))
            write(work.gram_counts, gram, np.int32(0))
            write(work.first_places, gram, np.int32(place))
            num_grams += 1
        write(work.gram_counts, gram, np.int32(read(work.gram_counts, gram) + 1))
        write(work.places, left, np.int32(place))
        write(work.grams, left, np.int32(gram))
        left += 1
    return left, num_grams


@helper
def _keep_repeated(work: GramWorkspace, num_places: Int) -> Int:
    """Keep the places of repeated n-grams, and return their number."""
    left = 0
    for i in range(num_places):
        place, gram = read(work.places, i), read(work.grams, i)
        if read(work.gram_counts, gram) > 1:
            write(work.places, left, place)
            write(work.grams, left, gram)
            left += 1
    return left


@inlined
def _characters(work: GramWorkspace, place: Int, n: int) -> Int:
    """Return the characters of the n words from ``place`` on."""
    total = np.int64(0)
    for k in range(place, place + n):
        total += read(work.word_lengths, read(work.words, k))
    return total


@helper
def _top_characters(work: GramWorkspace, n: int, num_grams: Int, num_words: Int) -> Int:
    """Return the characters of the most frequent n-gram, with a space between words, times its count.

    If several are as frequent, the first in the text counts.
    """
    if num_words < n:
        return np.int64(0)
    top_count, top_place = np.int64(1), np.int64(0)
    for gram in range(num_grams):
        if read(work.gram_counts, gram) > top_count:
            top_count, top_place = np.int64(read(work.gram_counts, gram)), np.int64(read(work.first_places, gram))
    return top_count * (_characters(work, top_place, n) + n - 1)


@helper
def _duplicate_characters(work: GramWorkspace, n: int, num_places: Int) -> Int:
    """Return the characters of the n-grams that occurred before, from left to right and without overlaps."""
    total, free = np.int64(0), np.int64(0)
    for i in range(num_places):
        place, gram = np.int64(read(work.places, i)), read(work.grams, i)
        if place < free or read(work.gram_counts, gram) < 2:
            continue
        if read(work.first_places, gram) < 0:
            total += _characters(work, place, n)
            free = place + n
        else:
            write(work.first_places, gram, np.int32(-1))  # it has occurred
    return total
