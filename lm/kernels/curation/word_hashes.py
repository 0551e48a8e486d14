"""Hashes of the normalized words of a document, and of its runs of n words.

The plain form of the words is :func:`lm.curate.normalized_words.normalize_words`; of the hashes, Python's integers in
the tests. A word of ASCII letters and digits is hashed where it is, with punctuation around it left out by bit masks.
Any other word is normalized character by character.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.curation.normalized_text import (
    IS_LONG,
    IS_OWN_WORD,
    IS_WHITESPACE,
    CharacterTables,
    NormalizedText,
    entry_at,
    make_normalized_text,
    normalize_text,
    text_of,
)
from lm.kernels.jit import ALL_BITS, Bytes, Int, Int64s, UInt64s, Word, helper, inlined
from lm.kernels.simd import bit_count, first_bit, fold_product, in_range, last_bit, load64, read, write

SEED, MULTIPLIER, LENGTH_MULTIPLIER = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
RUN_MULTIPLIER = 0xBF58476D1CE4E5B9
_SEED, _MULTIPLIER, _LENGTH_MULTIPLIER, _RUN_MULTIPLIER = map(
    np.uint64, (SEED, MULTIPLIER, LENGTH_MULTIPLIER, RUN_MULTIPLIER)
)
_DENSE = 24  # bytes of 64 that are not ASCII: their words are found by normalizing a block
_LOWER_CASE = np.uint64(0x2020202020202020)

BLOCK_WORDS = 2048  # of a document that are hashed at a time: they stay in the CPU's first cache


class WordBlock(NamedTuple):
    """Workspace for words that follow each other in a document."""

    hashes: UInt64s  # (BLOCK_WORDS,) of words
    begins: Int64s  # (BLOCK_WORDS,): where the words begin in the data
    ends: Int64s  # (BLOCK_WORDS,)
    runs: UInt64s  # (BLOCK_WORDS,): hashes of the n words from each word on
    normalized: NormalizedText


def make_word_block() -> WordBlock:
    """Return a workspace, for one thread at a time."""
    hashes, runs = (np.zeros(BLOCK_WORDS, np.uint64) for _ in range(2))
    begins, ends = (np.zeros(BLOCK_WORDS, np.int64) for _ in range(2))
    return WordBlock(hashes, begins, ends, runs, make_normalized_text())


@inlined
def _low_bytes(word: Word, n: Int) -> Word:
    """Return the ``n`` lowest bytes of a word, n ≥ 1."""
    return word & (ALL_BITS >> np.uint64(64 - 8 * min(n, 8)))


@inlined
def _hash_word(data: Bytes, begin: Int, length: Int, ored: Word) -> Word:
    """Return the hash of a word. ``ored`` has bits that are set in each of its bytes first: those of lower case.

    Words of up to 16 bytes need no branch that depends on their length.
    """
    hashed = fold_product(_SEED ^ _low_bytes(load64(data, begin) | ored, length), _MULTIPLIER)
    second = _low_bytes(load64(data, begin + 8) | ored, max(length - 8, 1))
    both = fold_product(hashed ^ second, _MULTIPLIER)
    hashed = both if length > 8 else hashed
    for done in range(16, length, 8):
        more = _low_bytes(load64(data, begin + done) | ored, length - done)
        hashed = fold_product(hashed ^ more, _MULTIPLIER)
    return fold_product(hashed ^ np.uint64(length), _LENGTH_MULTIPLIER)


@helper
def _next_word(data: Bytes, position: Int, end: Int, tables: CharacterTables) -> tuple[Word, Int, Int, Int]:
    """Return (hash, begin, end, next position) of the first word from ``position`` on, a character at a time.

    Stops also at white space before any word; its end is then its begin. The word is hashed eight bytes at a time, so
    that it may have any length.
    """
    hashed, chunk, num_bytes, length = _SEED, np.uint64(0), np.int64(0), np.int64(0)
    begin = last = position
    while position < end:
        entry, size = entry_at(data, position, end, tables)
        if entry & IS_WHITESPACE:
            position += size
            break
        if entry & IS_OWN_WORD and length:
            break
        text, count = text_of(entry)
        start, left = np.int64(text), count
        if entry & IS_LONG:
            text = load64(tables.replacements, start)
        if count and not length:
            begin = position
        while left > 0:
            text = _low_bytes(text, left)
            chunk |= text << np.uint64(8 * num_bytes)
            num_bytes += min(left, 8)
            if num_bytes >= 8:
                hashed = fold_product(hashed ^ chunk, _MULTIPLIER)
                num_bytes -= 8
                chunk = text >> np.uint64(8 * (min(left, 8) - num_bytes)) if num_bytes else np.uint64(0)
            left -= 8
            if left > 0:
                text = load64(tables.replacements, start + count - left)
        position += size
        if count:
            last = position
        length += count
        if entry & IS_OWN_WORD:
            break
    if num_bytes:
        hashed = fold_product(hashed ^ chunk, _MULTIPLIER)
    if length == 0:
        return hashed, position, position, position
    return fold_product(hashed ^ np.uint64(length), _LENGTH_MULTIPLIER), begin, last, position


@helper
def _dense_words(
    data: Bytes, position: Int, end: Int, tables: CharacterTables, block: WordBlock, count: Int
) -> tuple[Int, Int]:
    """Add words as :func:`next_words` does, a buffer of normalized text at most; none if the first one is longer."""
    text, begins, ends = block.normalized
    size = normalize_text(data, position, end, tables, block.normalized)
    begin = np.int64(-1)  # of a word whose end is not found yet
    for window in range(0, size, 64):
        spaces = in_range(text, window, 0, 0x20, 0x20)
        if size - window < 64:
            spaces &= ~(ALL_BITS << np.uint64(size - window))
        edges = spaces ^ (spaces << np.uint64(1) | np.uint64(begin < 0))
        while edges:
            place = window + first_bit(edges)
            edges &= edges - np.uint64(1)
            if begin < 0:
                begin = place
                continue
            if count == BLOCK_WORDS:
                return count, position
            write(block.hashes, count, _hash_word(text, begin, place - begin, np.uint64(0)))
            write(block.begins, count, read(begins, begin))
            position = read(ends, place)
            write(block.ends, count, position)
            count += 1
            begin = np.int64(-1)
    return count, position


@helper
def next_words(
    data: Bytes, position: Int, end: Int, tables: CharacterTables, block: WordBlock, count: Int
) -> tuple[Int, Int]:
    """Add the words of ``data[position:end]`` after the first ``count`` of the block, until it is full.

    Returns (number of words in the block, position after the last one). 64 bytes after the document are readable.
    """
    while position < end and count < BLOCK_WORDS:
        spaces = in_range(data, position, 0, 0x09, 0x0D) | in_range(data, position, 0, 0x1C, 0x20)
        plain = in_range(data, position, 0x20, 0x61, 0x7A) | in_range(data, position, 0, 0x30, 0x39)
        known = in_range(data, position, 0, 0x21, 0x7E)  # letters, digits and punctuation
        ascii_bytes = in_range(data, position, 0, 0, 0x7F)
        left = end - position
        if left < 64:
            spaces |= ALL_BITS << np.uint64(left)
        rest = ~spaces
        advance = np.int64(64) if rest == 0 else np.int64(0)
        while rest and count < BLOCK_WORDS:
            begin = first_bit(rest)
            after = spaces & (ALL_BITS << np.uint64(begin))
            if after == 0 and begin > 0:
                advance = begin  # the word may continue: look at it from its first byte on
                break
            stop = first_bit(after)  # 64 if the word is longer
            run = rest & ~(ALL_BITS << np.uint64(stop)) if stop < 64 else rest
            inside = plain & run
            if run & ~known == 0 and inside and stop < 64:
                first, last = first_bit(inside), last_bit(inside)
                span = (ALL_BITS << np.uint64(first)) & (ALL_BITS >> np.uint64(63 - last))
                if span & ~inside == 0:
                    write(block.hashes, count, _hash_word(data, position + first, last - first + 1, _LOWER_CASE))
                    write(block.begins, count, position + first)
                    write(block.ends, count, position + last + 1)
                    count += 1
                    advance = stop
                    rest &= ALL_BITS << np.uint64(stop)
                    continue
            if bit_count(rest & ~ascii_bytes) >= _DENSE:
                first_word = count
                count, following = _dense_words(data, position + begin, end, tables, block, count)
                if count > first_word:
                    advance = following - position
                    break
            hashed, word_begin, word_end, following = _next_word(data, position + begin, end, tables)
            if word_end > word_begin:
                write(block.hashes, count, hashed)
                write(block.begins, count, word_begin)
                write(block.ends, count, word_end)
                count += 1
            advance = following - position
            if advance >= 64:
                break
            rest &= ALL_BITS << np.uint64(advance)
        position += advance if rest else max(advance, np.int64(min(left, 64)))
    return count, min(position, end)


@inlined
def multiplier_power(n: Int) -> Word:
    """Return the factor of the word before a run of ``n`` words in the run's hash."""
    power = np.uint64(1)
    for _ in range(n):
        power *= _RUN_MULTIPLIER
    return power


@helper
def hash_runs(block: WordBlock, count: Int, n: Int, power: Word) -> Int:
    """Write the hashes of all runs of ``n`` words in a block of ``count`` words; return their number.

    A run's hash is the polynomial of the words' hashes, modulo 2^64. ``power`` is ``multiplier_power(n)``.
    """
    if count < n:
        return 0
    hashed = hash_first_words(block, n)
    write(block.runs, 0, hashed)
    for i in range(n, count):
        hashed = hashed * _RUN_MULTIPLIER + read(block.hashes, i) - read(block.hashes, i - n) * power
        write(block.runs, i - n + 1, hashed)
    return count - n + 1


@inlined
def hash_first_words(block: WordBlock, count: Int) -> Word:
    """Return the hash of the run of the first ``count`` words."""
    hashed = np.uint64(0)
    for i in range(count):
        hashed = hashed * _RUN_MULTIPLIER + read(block.hashes, i)
    return hashed


@helper
def keep_last_words(block: WordBlock, count: Int, n: Int) -> Int:
    """Move the last ``n`` - 1 of ``count`` words to the front, for the runs that end in the next block; return them."""
    kept = min(count, n - 1)
    for i in range(kept):
        write(block.hashes, i, read(block.hashes, count - kept + i))
        write(block.begins, i, read(block.begins, count - kept + i))
        write(block.ends, i, read(block.ends, count - kept + i))
    return kept
