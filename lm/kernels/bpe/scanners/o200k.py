"""Pretoken starts by the pattern of GPT-4o (o200k): 64 bytes at a time, as masks.

The reference is the ``regex`` pattern in :mod:`lm.text.patterns`. Bit k of a mask stands for byte k of the block; all
bytes of a character have the same bit. The carries hold the last bits of the masks of the block before.

- **Words** (alternatives 1 and 2: ``[upper or uncased]*[lower or uncased]+``, then the same with ``+`` and ``*``). The
  letters are ``upper`` (Lu, Lt), ``lower`` (Ll) and ``uncased``, which match both classes: Lm, Lo and marks (M). A run
  of letters starts a word. In the run, a capital starts another word if the word before it already has a small letter
  (``small``). After an uncased letter it starts another word only if no other letter follows the capitals; else the
  first class matches the uncased letter too, and all are one word: 日AB is two words, 日ABc one.
- **Contractions** after letters end their word: their letters are in none of the masks of letters, so that a letter
  after them starts a word.
- **Prefixes**: the character before a word that the word takes, a blank or an other character that starts a pretoken.
- **Digits** in groups of three (alternative 3).
- **Others** (alternative 4: the characters of no other mask). A run starts a pretoken, unless the space before it does.
  It takes the line breaks after it, and line breaks and slashes after those (``taken``). A mark after others belongs
  to them, except after a single other character that may be a prefix: then the mark is the first letter of a word.
- **Whitespace** (alternatives 5 to 7) is divided as in GPT-4's pattern; see :mod:`lm.kernels.bpe.scanners.cl100k`.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import (
    APOSTROPHE,
    SPACE,
    character_at,
    class_at,
    class_before,
    classify_non_ascii,
    contraction_length,
    divide_whitespace,
    find_groups,
    find_line_breaks,
    find_starts_of_whitespace,
    is_inner_whitespace,
    is_line_break,
    low_bits,
    size_without_last_whitespace,
    whole_characters,
    write_starts,
)
from lm.kernels.bpe.scanners.character_classes import LOWER, MARK, UNCASED, UPPER
from lm.kernels.jit import ONE, Bytes, Int32s, Word, helper, inlined
from lm.kernels.simd import first_bit, in_range, read

_SLASH = 0x2F


class O200kRules(NamedTuple):
    """The parameters of o200k. The registry chooses the scanner by their type."""

    max_digits: int
    """Most digits of a pretoken."""


@helper
def find_other_marks(
    marks: Word,
    others: Word,
    spaces: Word,
    continuation: Word,
    other_carry: Word,
    space_carry: Word,
    prefix_carry: Word,
) -> Word:
    """Return a mask of the marks that belong to the other characters before them.

    A mark after an other character that starts a pretoken is the first letter of a word.
    """
    found = np.uint64(0)
    candidates = marks & (others << ONE | other_carry)
    while candidates:
        bit = candidates & (~candidates + ONE)
        candidates &= candidates - ONE
        every = others | found
        prefixes = every & ~(every << ONE | other_carry) & ~(spaces << ONE | space_carry)
        prefixes = whole_characters(prefixes, every, continuation)
        if not bit & (prefixes << ONE | prefix_carry):
            found |= marks & ~(marks + bit)
    return found


@inlined
def end_of_slashes(slashes: Word, firsts: Word, size: int) -> int:
    """Return ``size``, or the end of the first run of ``slashes`` that starts at one of ``firsts`` if that is less.

    Whether the characters before a run take it decides whether a mark after it is a letter: the next block knows.
    """
    if firsts:
        after = (slashes + (firsts & (~firsts + ONE))) & ~slashes
        if after:
            k = first_bit(after)
            return k if k < size else size
    return size


@helper
def find_taken(line_breaks: Word, slashes: Word, follows_other: Word, others: Word, tail_carry: Word) -> Word:
    """Return a mask of the line breaks, and slashes after them, that other characters before them take."""
    if tail_carry == 0 and not slashes & (line_breaks << ONE):
        return line_breaks & ~(line_breaks + (line_breaks & follows_other))
    both = line_breaks | slashes
    firsts = (line_breaks & follows_other) | (both & tail_carry)
    taken = np.uint64(0)
    while firsts:
        taken |= both & ~(both + (firsts & (~firsts + ONE)))
        firsts &= ~taken
    return taken


@helper
def find_capitals_that_start(buffer: Bytes, block: int, end: int, capitals: Word, classes: Bytes) -> Word:
    """Return those of ``capitals``, each after a letter that has no case, whose run no letter follows.

    A small letter after the run would make one word of it and the letters before it.
    """
    starting = np.uint64(0)
    while capitals:
        position = block + first_bit(capitals)
        bit = capitals & (~capitals + ONE)
        capitals &= capitals - ONE
        while True:
            if position >= end:
                starting |= bit
                break
            point, length = character_at(buffer, position, end)
            if length == 0:
                return starting | bit  # the block with this character reports it
            character_class = np.int64(read(classes, point))
            if character_class != UPPER:
                if character_class != LOWER and character_class != UNCASED and character_class != MARK:
                    starting |= bit
                break
            position += length
    return starting


@helper
def find_taken_end(buffer: Bytes, position: int, end: int) -> int:
    """Return the end of the line breaks and slashes at ``position``."""
    while position < end and (is_line_break(read(buffer, position)) or read(buffer, position) == _SLASH):
        position += 1
    return position


@helper
def find_o200k_starts(buffer: Bytes, begin: int, end: int, classes: Bytes, rules: O200kRules, starts: Int32s) -> int:
    """Write the start of each pretoken of the text ``buffer[begin:end]`` to ``starts`` (end − begin + 64,).

    ``classes`` (0x110000,) is the class of each code point, with case. Returns the number of pretokens, or a status
    below 0.
    """
    count = 0
    # Of the byte before. ``small``: a word that can have no more capitals. ``tail``: line breaks and slashes that
    # other characters took. A prefix is a character that a letter after it takes into its pretoken.
    letter_carry = uncased_carry = small_carry = digit_carry = np.uint64(0)
    other_carry = tail_carry = space_carry = prefix_carry = np.uint64(0)
    group_digits = 0
    block = begin
    while block < end:
        size = end - block if end - block < 64 else 64
        valid = low_bits(size)
        upper = in_range(buffer, block, 0, 0x41, 0x5A) & valid
        lower = in_range(buffer, block, 0, 0x61, 0x7A) & valid
        digits = in_range(buffer, block, 0, 0x30, 0x39) & valid
        raw_spaces = in_range(buffer, block, 0, SPACE, SPACE) & valid
        whitespace = raw_spaces | (in_range(buffer, block, 0, 0x09, 0x0D) & valid)
        slashes = in_range(buffer, block, 0, _SLASH, _SLASH) & valid
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        uncased = continuation = np.uint64(0)
        if non_ascii:
            continuation = in_range(buffer, block, 0, 0x80, 0xBF) & valid
            size, more_lower, more_digits, more_whitespace, more_upper, uncased, marks, _, _ = classify_non_ascii(
                buffer, block, end, size, non_ascii, classes
            )
            if size < 0:
                return size
            upper, lower, digits = upper | more_upper, lower | more_lower, digits | more_digits
            whitespace |= more_whitespace
            if marks:
                line_breaks = find_line_breaks(buffer, block)
                size = end_of_slashes(slashes, slashes & (line_breaks << ONE | tail_carry), size)
                marks &= low_bits(size)
                known = upper | lower | uncased | digits | whitespace | marks
                marks &= ~find_other_marks(
                    marks, low_bits(size) & ~known, raw_spaces, continuation, other_carry, space_carry, prefix_carry
                )
                uncased |= marks
        letters = upper | lower | uncased
        contractions = np.uint64(0)
        apostrophes = in_range(buffer, block, 0, APOSTROPHE, APOSTROPHE) & (letters << ONE | letter_carry)
        apostrophes &= low_bits(size)
        while apostrophes:
            bit = apostrophes & (~apostrophes + ONE)
            apostrophes &= apostrophes - ONE
            k = first_bit(bit)
            length = contraction_length(buffer, block + k, end, 0x20)
            if length and bit & ~(contractions << ONE):
                if k + length > size:
                    size = k
                    break
                contractions |= low_bits(length) << np.uint64(k)
        size = size_without_last_whitespace(whitespace, block, size, end)
        if size == 0:
            position = block
            if other_carry | tail_carry:
                position = find_taken_end(buffer, block, end)
            tail_carry = np.uint64(position > block)
            block = position
            count, position, prefix_carry, space_carry = find_starts_of_whitespace(
                buffer, block, end, classes, False, False, 0, starts, count
            )
            if count < 0:
                return count
            if position > block:
                tail_carry = np.uint64(0)
            block = position
            letter_carry = uncased_carry = small_carry = digit_carry = other_carry = np.uint64(0)
            continue
        valid = low_bits(size)
        contractions &= valid
        in_words = valid & ~contractions
        upper, lower, uncased = upper & in_words, lower & in_words, uncased & in_words
        letters = upper | lower | uncased
        digits, whitespace, spaces = digits & valid, whitespace & valid, raw_spaces & valid
        others = in_words & ~(letters | digits | whitespace)

        # Other characters: a run starts a pretoken, unless a space before it does. It takes the line breaks after it,
        # and the line breaks and slashes after those.
        line_breaks = find_line_breaks(buffer, block) & valid
        taken = find_taken(line_breaks, slashes & valid, others << ONE | other_carry, others, tail_carry) & valid
        others &= ~taken
        line_breaks &= ~taken
        whitespace &= ~taken
        other_starts = others & ~(others << ONE | other_carry) & ~(spaces << ONE | space_carry)

        blanks, begins, rests = divide_whitespace(whitespace, line_breaks, valid & ~whitespace, continuation)
        begins |= rests | other_starts

        # A letter takes the blank before it, or the other character before it if that starts a pretoken.
        prefixes = whole_characters(other_starts, others, continuation) | blanks
        begins |= letters & ~(letters << ONE | letter_carry) & ~(prefixes << ONE | prefix_carry)

        # A capital after a small letter starts a word, also if letters without case are between them.
        small = lower
        if uncased:
            small |= uncased & ~(uncased + (uncased & (lower << ONE | small_carry)))
        begins |= upper & (small << ONE | small_carry)
        after_uncased = upper & ((uncased & ~small) << ONE | uncased_carry)
        if after_uncased:
            begins |= find_capitals_that_start(buffer, block, end, after_uncased, classes)

        if digits:
            groups, group_digits = find_groups(digits, digit_carry, continuation, group_digits, rules.max_digits)
            begins |= groups

        count = write_starts(begins, block, starts, count)
        top = np.uint64(size - 1)
        letter_carry, small_carry, uncased_carry = letters >> top, small >> top, (uncased & ~small) >> top
        digit_carry, other_carry, tail_carry = digits >> top, others >> top, taken >> top
        space_carry, prefix_carry = spaces >> top, prefixes >> top
        block += size
    return count


@inlined
def may_join_o200k(buffer: Bytes, begin: int, position: int, end: int, classes: Bytes) -> bool:
    """Return whether whitespace is inside a run at ``position``, or a capital is there after a letter without case or a
    mark. A small letter after the capitals would join them."""
    if is_inner_whitespace(buffer, begin, position, end, classes):
        return True
    is_capital = class_at(buffer, position, end, classes) == UPPER
    return is_capital and class_before(buffer, begin, position, classes) > UPPER
