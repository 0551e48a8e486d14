"""The tokens of a text for the rules of curation: words, with contractions split off, and symbols.

A word begins with a letter or a number and goes on with letters, numbers and marks. One of ``'’._`` before a letter or
a number joins, and ``,`` or ``:`` between two numbers. Endings such as ``'s`` and ``n't`` are words of their own, as in
the Penn Treebank. The full stop of ``Mr.`` belongs to the word. Every other character is a symbol; full stops in a row
are one, and so are hyphens.
"""

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import character_at, class_at
from lm.kernels.curation.text_classes import LETTER, NUMBER, STARTS_WORD, WORD
from lm.kernels.jit import Bytes, Int, helper, inlined
from lm.kernels.simd import first_bit, in_range, read

APOSTROPHE, COMMA, FULL_STOP, COLON, UNDERSCORE, RIGHT_QUOTE = 0x27, 0x2C, 0x2E, 0x3A, 0x5F, 0x2019


@inlined
def has_class(data: Bytes, position: Int, end: Int, classes: Bytes, flags: int) -> bool:
    """Return whether the character at ``position`` has one of the classes ``flags``; False at the end."""
    return bool(position < end and class_at_valid(data, position, end, classes) & flags != 0)


@inlined
def class_at_valid(data: Bytes, position: Int, end: Int, classes: Bytes) -> Int:
    """Return the classes of the character at ``position``."""
    byte = np.int64(read(data, position))
    return np.int64(read(classes, byte)) if byte < 0x80 else np.int64(class_at(data, position, end, classes))


@helper
def scan_word(data: Bytes, begin: Int, end: Int, classes: Bytes) -> tuple[Int, Int, Int, Int, Int]:
    """Find the end of the word at ``begin``, before contractions are split off.

    Returns (end of the word, bytes of its characters except each first one, letters, place of the last joining
    character, letters before it).
    """
    position, join = begin, begin
    tails: Int = 0
    letters: Int = 0
    letters_before_join: Int = 0
    last_class: Int = 0
    while position < end:
        byte = np.int64(read(data, position))
        if byte >= 0x80:
            point, length = character_at(data, position, end)
            character_class = np.int64(read(classes, point)) if length else np.int64(0)
            if character_class & WORD:
                letters += character_class & LETTER
            elif point == RIGHT_QUOTE and has_class(data, position + 3, end, classes, STARTS_WORD):
                join, letters_before_join = position, letters
            else:
                break
            last_class = character_class
            tails += length - 1
            position += length
            continue
        run = first_bit(~in_range(data, position, 0x20, 0x61, 0x7A))
        if run:
            run = min(run, end - position)
            letters += run
            position += run
            last_class = LETTER
            continue
        character_class = np.int64(read(classes, byte))
        if character_class & NUMBER == 0:
            if byte in (APOSTROPHE, FULL_STOP, UNDERSCORE):
                if not has_class(data, position + 1, end, classes, STARTS_WORD):
                    break
                join, letters_before_join = position, letters
            elif not (
                byte in (COMMA, COLON) and last_class & NUMBER and has_class(data, position + 1, end, classes, NUMBER)
            ):
                break
        last_class = character_class
        position += 1
    return position, tails, letters, join, letters_before_join


@inlined
def contraction_start(data: Bytes, begin: Int, join: Int, end: Int) -> Int:
    """Return where the contraction at the end of a word begins; ``end`` if there is no contraction.

    ``join``: the last joining character of the word, or its begin.
    """
    suffix = join + 1
    if join == begin:
        return end
    if read(data, join) == 0xE2:
        suffix += 2  # of the joining characters, only the right quotation mark is not ASCII
    elif read(data, join) != APOSTROPHE:
        return end
    first, second = read(data, suffix) | 0x20, read(data, suffix + 1) | 0x20
    if end - suffix == 1:
        if first == 0x73 or first == 0x6D or first == 0x64:  # s m d
            return join
        if first == 0x74 and read(data, join - 1) | 0x20 == 0x6E and join - 1 > begin:  # n't
            return join - 1
    elif end - suffix == 2 and (
        (first == 0x6C and second == 0x6C) or ((first == 0x72 or first == 0x76) and second == 0x65)  # ll re ve
    ):
        return join
    return end


@inlined
def is_title_before_stop(data: Bytes, begin: Int, end: Int, line_end: Int) -> bool:
    """Return whether a word is Mr, Mrs, Ms or Dr, and one full stop follows it."""
    if end >= line_end or read(data, end) != FULL_STOP or end - begin < 2 or end - begin > 3:
        return False
    if end + 1 < line_end and read(data, end + 1) == FULL_STOP:
        return False
    first, second = read(data, begin), read(data, begin + 1)
    if end - begin == 3:
        return first == 0x4D and second == 0x72 and read(data, begin + 2) == 0x73  # Mrs
    return (first == 0x4D and (second == 0x72 or second == 0x73)) or (first == 0x44 and second == 0x72)  # Mr Ms Dr
