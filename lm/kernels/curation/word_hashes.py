"""Hashes of the normalized words of a document, and of its runs of n words.

The plain form of the words is :func:`lm.curate.normalized_words.normalize_words`; of the hashes, Python's integers in
the tests. A word of ASCII letters and digits is hashed where it is, with punctuation around it left out by bit masks.
Any other word is normalized character by character.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import character_at
from lm.kernels.jit import ALL_BITS, Bytes, Int, Int64s, UInt32s, UInt64s, Word, helper, inlined
from lm.kernels.simd import first_bit, fold_product, in_range, last_bit, load64, read, write

# An entry of the character table: 0 for a character that stays as it is, or flags, with the start (from bit 6) and the
# length (bits 2 to 5) of its replacement.
IS_REPLACED, IS_OWN_WORD = 1, 2  # the second: the character is a word, whatever stands beside it
WHITESPACE = 0xFFFFFFFF

SEED, MULTIPLIER, LENGTH_MULTIPLIER = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
RUN_MULTIPLIER = 0xBF58476D1CE4E5B9
_SEED, _MULTIPLIER, _LENGTH_MULTIPLIER, _RUN_MULTIPLIER = map(
    np.uint64, (SEED, MULTIPLIER, LENGTH_MULTIPLIER, RUN_MULTIPLIER)
)
_LOWER_CASE = np.uint64(0x2020202020202020)

BLOCK_WORDS = 2048  # of a document that are hashed at a time: they stay in the CPU's first cache


class CharacterTables(NamedTuple):
    """What becomes of each character in normalized text."""

    codes: UInt32s  # (0x110000,)
    replacements: Bytes  # UTF-8 of all replacements, and 64 bytes of padding


class WordBlock(NamedTuple):
    """Workspace for words that follow each other in a document."""

    hashes: UInt64s  # (BLOCK_WORDS,) of words
    begins: Int64s  # (BLOCK_WORDS,): where the words begin in the data
    ends: Int64s  # (BLOCK_WORDS,)
    runs: UInt64s  # (BLOCK_WORDS,): hashes of the n words from each word on


def make_word_block() -> WordBlock:
    """Return a workspace, for one thread at a time."""
    hashes, runs = (np.zeros(BLOCK_WORDS, np.uint64) for _ in range(2))
    begins, ends = (np.zeros(BLOCK_WORDS, np.int64) for _ in range(2))
    return WordBlock(hashes, begins, ends, runs)


@inlined
def _low_bytes(word: Word, n: Int) -> Word:
    """Return the ``n`` lowest bytes of a word, 0 ≤ n ≤ 8."""
    return word & (ALL_BITS >> np.uint64(64 - 8 * n)) if n > 0 else np.uint64(0)


@inlined
def _hash_ascii(data: Bytes, begin: Int, length: Int) -> Word:
    """Return the hash of a word of ASCII letters and digits, in lower case."""
    hashed, position, rest = _SEED, begin, length
    while rest >= 8:
        hashed = fold_product(hashed ^ (load64(data, position) | _LOWER_CASE), _MULTIPLIER)
        position += 8
        rest -= 8
    if rest:
        hashed = fold_product(hashed ^ _low_bytes(load64(data, position) | _LOWER_CASE, rest), _MULTIPLIER)
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
        point, size = character_at(data, position, end)
        if size == 0:
            point, size = 0xFFFD, 1  # a byte that is not valid UTF-8
        code = np.int64(read(tables.codes, point))
        if code == WHITESPACE:
            position += size
            break
        start, count = (code >> 6, (code >> 2) & 15) if code & IS_REPLACED else (position, size)
        if code & IS_OWN_WORD and length:
            break
        if count and not length:
            begin = position
        position += size
        if count:
            last = position
        for k in range(count):
            byte = read(tables.replacements, start + k) if code & IS_REPLACED else read(data, start + k)
            chunk |= np.uint64(byte) << np.uint64(8 * num_bytes)
            num_bytes += 1
            if num_bytes == 8:
                hashed = fold_product(hashed ^ chunk, _MULTIPLIER)
                chunk, num_bytes = np.uint64(0), np.int64(0)
        length += count
        if code & IS_OWN_WORD:
            break
    if num_bytes:
        hashed = fold_product(hashed ^ chunk, _MULTIPLIER)
    if length == 0:
        return hashed, position, position, position
    return fold_product(hashed ^ np.uint64(length), _LENGTH_MULTIPLIER), begin, last, position


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
                    write(block.hashes, count, _hash_ascii(data, position + first, last - first + 1))
                    write(block.begins, count, position + first)
                    write(block.ends, count, position + last + 1)
                    count += 1
                    advance = stop
                    rest &= ALL_BITS << np.uint64(stop)
                    continue
            hashed, word_begin, word_end, following = _next_word(data, position + begin, end, tables)
            if word_end > word_begin:
                write(block.hashes, count, hashed)
                write(block.begins, count, word_begin)
                write(block.ends, count, word_end)
                count += 1
            advance = following - position
            if stop == 64 or run & ~ascii_bytes:
                break  # the word ended elsewhere
            rest &= ALL_BITS << np.uint64(stop)
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
