"""Normalized text in a buffer: the characters of a text as the tables give them, with a space between two words.

Text in which most characters are not ASCII is normalized a block at a time without a branch for each character, and its
words are then found by bit masks. The plain form is :func:`lm.curate.normalized_words.normalize_words`.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import character_at
from lm.kernels.jit import Bytes, Int, Int64s, UInt64s, Word, helper, inlined
from lm.kernels.simd import load64, read, store64, write

# An entry of the character table: up to 7 bytes of normalized text from bit 0, their number from bit 56, and flags.
# Text of more bytes is in `replacements`, and the entry has its start.
COUNT_BIT = 56
IS_OWN_WORD, IS_WHITESPACE, IS_LONG = (np.uint64(1 << bit) for bit in (60, 61, 62))
LONGEST = 7

NORMALIZED_BYTES = 256  # of a buffer, about
_COUNT_BIT, _TEXT, _SPACE = np.uint64(COUNT_BIT), np.uint64((1 << COUNT_BIT) - 1), np.uint64(0x20)
_NOWHERE = NORMALIZED_BYTES + 64  # an element of ``ends`` that nothing reads


class CharacterTables(NamedTuple):
    """What becomes of each character in normalized text."""

    entries: UInt64s  # (0x110000,)
    replacements: Bytes  # UTF-8 of the replacements of more than 7 bytes, and 64 bytes of padding


class NormalizedText(NamedTuple):
    """A buffer of normalized text, and where its words are in the data."""

    text: Bytes  # (NORMALIZED_BYTES + 128,): UTF-8
    begins: Int64s  # where the character begins that became the text from an element on
    ends: Int64s  # where the character ends that became the text before an element


def make_normalized_text() -> NormalizedText:
    """Return an empty buffer, for one thread at a time."""
    size = NORMALIZED_BYTES + 128
    return NormalizedText(np.zeros(size, np.uint8), np.zeros(size, np.int64), np.zeros(size, np.int64))


@inlined
def entry_at(data: Bytes, position: Int, end: Int, tables: CharacterTables) -> tuple[Word, Int]:
    """Return the table's entry of the character at ``position``, and the character's length in bytes."""
    first, second = np.int64(read(data, position)), np.int64(read(data, position + 1))
    point, length = first, np.int64(1)
    if first >= 0xC2 and first < 0xE0 and second & 0xC0 == 0x80 and position + 1 < end:
        point, length = (first & 0x1F) << 6 | second & 0x3F, np.int64(2)
    elif first >= 0x80:
        point, length = character_at(data, position, end)
        if length == 0:
            point, length = np.int64(0xFFFD), np.int64(1)  # a byte that is not valid UTF-8
    return read(tables.entries, point), length


@inlined
def text_of(entry: Word) -> tuple[Word, Int]:
    """Return the text of an entry that is not long, and its number of bytes."""
    return entry & _TEXT, np.int64(entry >> _COUNT_BIT) & 15


@helper
def normalize_text(data: Bytes, position: Int, end: Int, tables: CharacterTables, buffer: NormalizedText) -> Int:
    """Normalize ``data[position:end]`` until the buffer is full; return the number of bytes in the buffer.

    The last word ends with a space in the buffer only if it is whole.
    """
    size = np.int64(0)
    while position < end and size < NORMALIZED_BYTES:
        entry, length = entry_at(data, position, end, tables)
        text, count = text_of(entry)
        is_own_word = np.int64(entry & IS_OWN_WORD != 0)
        if entry & IS_LONG:
            start = np.int64(text)
            store64(buffer.text, size + 8, load64(tables.replacements, start + 8))
            text = load64(tables.replacements, start)
        if is_own_word:
            write(buffer.text, size, np.uint8(0x20))
            size += 1
        store64(buffer.text, size, text)
        write(buffer.begins, size, position)
        position += length
        size += count
        write(buffer.ends, size if count and entry & IS_WHITESPACE == 0 else _NOWHERE, position)
        if is_own_word:
            write(buffer.text, size, np.uint8(0x20))
            size += 1
    if position >= end:
        write(buffer.text, size, np.uint8(0x20))
        size += 1
    return size
