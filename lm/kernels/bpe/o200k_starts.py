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
- **Whitespace** (alternatives 5 to 7) is divided as in GPT-4's pattern; see :mod:`lm.kernels.bpe.cl100k_starts`.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.cl100k_starts import (
    before_line_break,
    caseless_contraction_length,
    find_groups,
    find_line_breaks,
    find_starts_of_whitespace,
    is_line_break,
)
from lm.kernels.bpe.classes import DIGIT, LOWER, MARK, UNCASED, UPPER, WHITESPACE
from lm.kernels.bpe.pretoken_starts import character_at, low_bits, move_to_first_bytes, write_starts
from lm.kernels.jit import INVALID_UTF8, Bytes, Int, Int32s, Word, helper, inlined
from lm.kernels.simd import first_bit, in_range, last_bit, read

_ONE = np.uint64(1)
_APOSTROPHE, _SPACE, _SLASH = 0x27, 0x20, 0x2F


class O200kRules(NamedTuple):
    """The parameters of o200k. :mod:`lm.kernels.bpe.scan` chooses the scanner by their type."""

    max_digits: int
    """Most digits of a pretoken."""


@inlined
def class_and_length_at(buffer: Bytes, position: Int, end: int, classes: Bytes) -> tuple[Int, Int]:
    """Return (class, length in bytes) of the character at ``position``; length 0 if it is not valid."""
    point, length = character_at(buffer, position, end)
    return np.int64(read(classes, point)), length


@helper
def classify_non_ascii(
    buffer: Bytes, block: int, end: int, size: int, non_ascii: Word, classes: Bytes
) -> tuple[int, Word, Word, Word, Word, Word, Word]:
    """Classify the non-ASCII characters of the 64-byte block at ``block``.

    Returns (size, upper, lower, uncased, marks, digits, whitespace). ``size`` shrinks if a character crosses the end of
    the block, or is a status below 0.
    """
    upper = lower = uncased = marks = digits = whitespace = np.uint64(0)
    while non_ascii:
        k = first_bit(non_ascii)
        character_class, length = class_and_length_at(buffer, block + k, end, classes)
        if length == 0:
            return INVALID_UTF8 - (block + k), upper, lower, uncased, marks, digits, whitespace
        if k + length > 64:
            size = k
            break
        bits = low_bits(length) << np.uint64(k)
        non_ascii &= ~bits
        if character_class == UNCASED:
            uncased |= bits
        elif character_class == LOWER:
            lower |= bits
        elif character_class == UPPER:
            upper |= bits
        elif character_class == MARK:
            marks |= bits
        elif character_class == DIGIT:
            digits |= bits
        elif character_class == WHITESPACE:
            whitespace |= bits
    return size, upper, lower, uncased, marks, digits, whitespace


@inlined
def whole_characters(first: Word, mask: Word, continuation: Word) -> Word:
    """Return the bits ``first`` of first bytes with those of all bytes of their characters, which are in ``mask``."""
    if mask & continuation:
        for _ in range(3):
            first |= (first << _ONE) & continuation
    return first


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
    candidates = marks & (others << _ONE | other_carry)
    while candidates:
        bit = candidates & (~candidates + _ONE)
        candidates &= candidates - _ONE
        every = others | found
        prefixes = every & ~(every << _ONE | other_carry) & ~(spaces << _ONE | space_carry)
        prefixes = whole_characters(prefixes, every, continuation)
        if not bit & (prefixes << _ONE | prefix_carry):
            found |= marks & ~(marks + bit)
    return found


@inlined
def end_of_slashes(slashes: Word, firsts: Word, size: int) -> int:
    """Return ``size``, or the end of the first run of ``slashes`` that starts at one of ``firsts`` if that is less.

    Whether the characters before a run take it decides whether a mark after it is a letter: the next block knows.
    """
    if firsts:
        after = (slashes + (firsts & (~firsts + _ONE))) & ~slashes
        if after:
            k = first_bit(after)
            return k if k < size else size
    return size


@helper
def find_taken(line_breaks: Word, slashes: Word, follows_other: Word, others: Word, tail_carry: Word) -> Word:
    """Return a mask of the line breaks, and slashes after them, that other characters before them take."""
    if tail_carry == 0 and not slashes & (line_breaks << _ONE):
        return line_breaks & ~(line_breaks + (line_breaks & follows_other))
    both = line_breaks | slashes
    firsts = (line_breaks & follows_other) | (both & tail_carry)
    taken = np.uint64(0)
    while firsts:
        taken |= both & ~(both + (firsts & (~firsts + _ONE)))
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
        bit = capitals & (~capitals + _ONE)
        capitals &= capitals - _ONE
        while True:
            if position >= end:
                starting |= bit
                break
            character_class, length = class_and_length_at(buffer, position, end, classes)
            if length == 0:
                return starting | bit  # the block with this character reports it
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
        raw_spaces = in_range(buffer, block, 0, _SPACE, _SPACE) & valid
        whitespace = raw_spaces | (in_range(buffer, block, 0, 0x09, 0x0D) & valid)
        slashes = in_range(buffer, block, 0, _SLASH, _SLASH) & valid
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        uncased = continuation = np.uint64(0)
        if non_ascii:
            continuation = in_range(buffer, block, 0, 0x80, 0xBF) & valid
            size, more_upper, more_lower, uncased, marks, more_digits, more_whitespace = classify_non_ascii(
                buffer, block, end, size, non_ascii, classes
            )
            if size < 0:
                return size
            upper, lower, digits = upper | more_upper, lower | more_lower, digits | more_digits
            whitespace |= more_whitespace
            if marks:
                line_breaks = find_line_breaks(buffer, block)
                size = end_of_slashes(slashes, slashes & (line_breaks << _ONE | tail_carry), size)
                marks &= low_bits(size)
                known = upper | lower | uncased | digits | whitespace | marks
                marks &= ~find_other_marks(
                    marks, low_bits(size) & ~known, raw_spaces, continuation, other_carry, space_carry, prefix_carry
                )
                uncased |= marks
        letters = upper | lower | uncased
        contractions = np.uint64(0)
        apostrophes = in_range(buffer, block, 0, _APOSTROPHE, _APOSTROPHE) & (letters << _ONE | letter_carry)
        apostrophes &= low_bits(size)
        while apostrophes:
            bit = apostrophes & (~apostrophes + _ONE)
            apostrophes &= apostrophes - _ONE
            k = first_bit(bit)
            length = caseless_contraction_length(buffer, block + k, end)
            if length and bit & ~(contractions << _ONE):
                if k + length > size:
                    size = k
                    break
                contractions |= low_bits(length) << np.uint64(k)
        if block + size < end and whitespace >> np.uint64(size - 1) & _ONE:
            text = low_bits(size) & ~whitespace
            if text == 0:
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
            size = last_bit(text) + 1
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
        taken = find_taken(line_breaks, slashes & valid, others << _ONE | other_carry, others, tail_carry) & valid
        others &= ~taken
        line_breaks &= ~taken
        whitespace &= ~taken
        other_starts = others & ~(others << _ONE | other_carry) & ~(spaces << _ONE | space_carry)

        # Whitespace: a run starts a pretoken; so does the rest after its last line break, and the last character of
        # the rest if something else follows.
        blanks = whitespace & ~line_breaks
        begins = whitespace & ~(whitespace << _ONE)
        rests = blanks & (line_breaks << _ONE)
        if rests:
            rests &= ~before_line_break(line_breaks, whitespace)
        last = move_to_first_bytes(blanks & ((valid & ~whitespace) >> _ONE), whitespace & continuation)
        begins |= rests | last | other_starts

        # A letter takes the blank before it, or the other character before it if that starts a pretoken.
        prefixes = whole_characters(other_starts, others, continuation) | blanks
        begins |= letters & ~(letters << _ONE | letter_carry) & ~(prefixes << _ONE | prefix_carry)

        # A capital after a small letter starts a word, also if letters without case are between them.
        small = lower
        if uncased:
            small |= uncased & ~(uncased + (uncased & (lower << _ONE | small_carry)))
        begins |= upper & (small << _ONE | small_carry)
        after_uncased = upper & ((uncased & ~small) << _ONE | uncased_carry)
        if after_uncased:
            begins |= find_capitals_that_start(buffer, block, end, after_uncased, classes)

        if digits:
            runs = digits & ~(digits << _ONE | digit_carry)
            groups, group_digits = find_groups(digits & ~continuation, runs, group_digits, rules.max_digits)
            begins |= groups

        count = write_starts(begins, block, starts, count)
        top = np.uint64(size - 1)
        letter_carry, small_carry, uncased_carry = letters >> top, small >> top, (uncased & ~small) >> top
        digit_carry, other_carry, tail_carry = digits >> top, others >> top, taken >> top
        space_carry, prefix_carry = spaces >> top, prefixes >> top
        block += size
    return count
