"""Pretoken starts by the patterns of GPT-4 (cl100k), Llama 3 and Qwen 2: 64 bytes at a time, as masks.

The reference is the ``regex`` pattern in :mod:`lm.text.patterns`. In contrast to GPT-2's pattern, a letter takes the
character before it, digits come in groups, line breaks belong to the whitespace before them or to the other characters
before them, and contractions may be in upper case. The masks are those of :mod:`lm.kernels.bpe.pretoken_starts`.

A line break decides how the whole run of whitespace around it is divided. So a block ends before a run of whitespace
that may go on after it, and a run that fills a block is read character by character.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.classes import WHITESPACE
from lm.kernels.bpe.pretoken_starts import character_at, classify_non_ascii, low_bits, move_to_first_bytes, write_starts
from lm.kernels.jit import INVALID_UTF8, Bytes, Int, Int32s, Word, helper, inlined
from lm.kernels.simd import first_bit, in_range, last_bit, read, write

_ONE = np.uint64(1)
_APOSTROPHE, _SPACE, _LINE_FEED, _CARRIAGE_RETURN = 0x27, 0x20, 0x0A, 0x0D
_LONG_S, _LONG_S_TAIL = 0xC5, 0xBF  # the bytes of U+017F, which equals s if case does not matter


class Cl100kRules(NamedTuple):
    """What differs between the patterns of this family."""

    max_digits: int
    """Most digits of a pretoken."""
    joins_last_whitespace: bool
    """Whether whitespace at the end of the text is one pretoken, even if it has line breaks."""


@inlined
def caseless_contraction_length(buffer: Bytes, position: int, end: int) -> int:
    """Return the length of the contraction (``'s``, ``'LL``, ...) at an apostrophe; 0 if there is no contraction."""
    if position + 1 < end:
        a = read(buffer, position + 1) | 0x20
        if a == 0x73 or a == 0x64 or a == 0x6D or a == 0x74:  # s d m t
            return 2
        if position + 2 < end:
            b = read(buffer, position + 2)
            if read(buffer, position + 1) == _LONG_S and b == _LONG_S_TAIL:
                return 3
            b |= 0x20
            if (a == 0x6C and b == 0x6C) or ((a == 0x76 or a == 0x72) and b == 0x65):  # ll ve re
                return 3
    return 0


@helper
def find_groups(leads: Word, runs: Word, count: int, max_digits: int) -> tuple[Word, int]:
    """Return a mask of the first digits of groups, and the digits of the last group.

    ``leads`` marks the first byte of each digit, ``runs`` those that start a run. ``count`` is the digits of the last
    group before.
    """
    groups = np.uint64(0)
    while leads:
        bit = leads & (~leads + _ONE)
        leads &= leads - _ONE
        if bit & runs or count == max_digits:
            count = 0
        if count == 0:
            groups |= bit
        count += 1
    return groups, count


@inlined
def before_line_break(line_breaks: Word, whitespace: Word) -> Word:
    """Return a mask of the whitespace with a line break at or after it in the same run."""
    shift = _ONE
    while shift < np.uint64(64):
        line_breaks |= whitespace & (line_breaks >> shift)
        whitespace &= whitespace >> shift
        shift += shift
    return line_breaks


@inlined
def is_line_break(byte: Int) -> bool:
    """Return whether a byte is a line feed or a carriage return."""
    return byte == _LINE_FEED or byte == _CARRIAGE_RETURN  # numba compiles ``in`` as more functions


@inlined
def find_line_breaks(buffer: Bytes, block: int) -> Word:
    """Return a mask of the line feeds and carriage returns of the 64 bytes at ``block``."""
    line_feeds = in_range(buffer, block, 0, _LINE_FEED, _LINE_FEED)
    return line_feeds | in_range(buffer, block, 0, _CARRIAGE_RETURN, _CARRIAGE_RETURN)


@helper
def find_starts_of_whitespace(
    buffer: Bytes,
    position: int,
    end: int,
    classes: Bytes,
    joins_last_whitespace: bool,
    follows_other: bool,
    undivided: int,
    starts: Int32s,
    count: int,
) -> tuple[int, int, Word, Word]:
    """Write the starts of the pretokens of a run of whitespace at ``position``, character by character.

    ``follows_other``: a character before it takes its first line breaks. ``undivided``: bit c is set if whitespace
    before a character of class c stays whole. Returns (number of starts or a status below 0, end of the run, 1 if its
    last character is no line break, 1 if it is a space).
    """
    if follows_other:
        while position < end and is_line_break(read(buffer, position)):
            position += 1
    first = rest = last = position
    is_whole = False
    while position < end:
        point, length = character_at(buffer, position, end)
        if length == 0:
            return INVALID_UTF8 - position, position, np.uint64(0), np.uint64(0)
        character_class = np.int64(read(classes, point))
        if character_class != WHITESPACE:
            is_whole = undivided >> character_class & 1 != 0
            break
        last = position
        position += length
        if is_line_break(point):
            rest = position
    is_joined = joins_last_whitespace and position == end
    if first < position:
        write(starts, count, np.int32(first))
        count += 1
        if first < rest < position and not is_joined:
            write(starts, count, np.int32(rest))
            count += 1
        if last > rest and position < end and not is_whole:
            write(starts, count, np.int32(last))
            count += 1
    has_prefix = rest < position
    is_space = has_prefix and read(buffer, position - 1) == _SPACE
    return count, position, np.uint64(has_prefix), np.uint64(is_space)


@helper
def find_cl100k_starts(buffer: Bytes, begin: int, end: int, classes: Bytes, rules: Cl100kRules, starts: Int32s) -> int:
    """Write the start of each pretoken of the text ``buffer[begin:end]`` to ``starts`` (end − begin + 64,).

    ``classes`` (0x110000,) is the class of each code point. Returns the number of pretokens, or a status below 0.
    """
    count = 0
    # Of the byte before. A prefix is a character that a letter after it takes into its pretoken.
    letter_carry = digit_carry = other_carry = space_carry = prefix_carry = np.uint64(0)
    added_next = np.uint64(0)  # starts in the next block that a contraction adds
    group_digits = 0
    block = begin
    while block < end:
        size = end - block if end - block < 64 else 64
        valid = low_bits(size)
        letters = in_range(buffer, block, 0x20, 0x61, 0x7A) & valid
        digits = in_range(buffer, block, 0, 0x30, 0x39) & valid
        whitespace = (in_range(buffer, block, 0, _SPACE, _SPACE) | in_range(buffer, block, 0, 0x09, 0x0D)) & valid
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        tails = np.uint64(0)
        if non_ascii:
            size, letters, digits, whitespace, tails = classify_non_ascii(
                buffer, block, end, size, non_ascii, letters, digits, whitespace, classes
            )
            if size < 0:
                return size
            valid = low_bits(size)
        if block + size < end and whitespace >> np.uint64(size - 1):
            text = valid & ~whitespace
            if text == 0:
                count, block, prefix_carry, space_carry = find_starts_of_whitespace(
                    buffer, block, end, classes, rules.joins_last_whitespace, other_carry != 0, 0, starts, count
                )
                if count < 0:
                    return count
                letter_carry = digit_carry = other_carry = added_next = np.uint64(0)
                continue
            size = last_bit(text) + 1
            valid = low_bits(size)
            letters, digits, whitespace, tails = letters & valid, digits & valid, whitespace & valid, tails & valid
        spaces = in_range(buffer, block, 0, _SPACE, _SPACE) & valid
        continuation = in_range(buffer, block, 0, 0x80, 0xBF) & valid
        others = valid & ~(letters | digits | whitespace)

        # Other characters: a run starts a pretoken, unless a space before it does. It takes the line breaks after it.
        other_starts = others & ~(others << _ONE | other_carry) & ~(spaces << _ONE | space_carry)
        line_breaks = find_line_breaks(buffer, block) & valid
        taken = line_breaks & ~(line_breaks + (line_breaks & (others << _ONE | other_carry)))
        line_breaks &= ~taken
        whitespace &= ~taken

        # Whitespace: a run starts a pretoken; so does the rest after its last line break, and the last character of
        # the rest if something else follows.
        blanks = whitespace & ~line_breaks
        begins = whitespace & ~(whitespace << _ONE)
        rests = blanks & (line_breaks << _ONE)
        if rests:
            rests &= ~before_line_break(line_breaks, whitespace)
            if rules.joins_last_whitespace and block + size == end:
                text = valid & ~whitespace
                rests &= low_bits(last_bit(text) + 1 if text else 0)
        last = blanks & ((valid & ~whitespace) >> _ONE)
        last = move_to_first_bytes(last, tails)
        begins |= rests | last | other_starts

        # A letter takes the blank before it, or the other character before it if that starts a pretoken.
        prefixes = other_starts
        if continuation & others:
            for _ in range(3):  # all bytes of the character
                prefixes |= (prefixes << _ONE) & continuation
        prefixes |= blanks
        begins |= letters & ~(letters << _ONE | letter_carry) & ~(prefixes << _ONE | prefix_carry)

        if digits:
            runs = digits & ~(digits << _ONE | digit_carry)
            groups, group_digits = find_groups(digits & ~continuation, runs, group_digits, rules.max_digits)
            begins |= groups

        begins = (begins | added_next) & valid
        added_next = np.uint64(0)
        apostrophes = in_range(buffer, block, 0, _APOSTROPHE, _APOSTROPHE) & other_starts
        while apostrophes:
            k = first_bit(apostrophes)
            apostrophes &= apostrophes - _ONE
            length = caseless_contraction_length(buffer, block + k, end)
            if length and block + k + length < end:
                if k + length < size:
                    begins |= _ONE << np.uint64(k + length)
                else:
                    added_next |= _ONE << np.uint64(k + length - size)

        count = write_starts(begins, block, starts, count)
        top = np.uint64(size - 1)
        letter_carry, digit_carry, other_carry = letters >> top, digits >> top, others >> top
        space_carry, prefix_carry = spaces >> top, prefixes >> top
        block += size
    return count
