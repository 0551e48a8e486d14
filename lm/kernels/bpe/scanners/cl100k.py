"""Pretoken starts by the patterns of GPT-4 (cl100k), Llama 3 and Qwen 2: 64 bytes at a time, as masks.

The reference is the ``regex`` pattern in :mod:`lm.text.patterns`. In contrast to GPT-2's pattern, a letter takes the
character before it, digits come in groups, line breaks belong to the whitespace before them or to the other characters
before them, and contractions may be in upper case.

A line break decides how the whole run of whitespace around it is divided. So a block ends before a run of whitespace
that may go on after it, and a run that fills a block is read character by character.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import (
    APOSTROPHE,
    SPACE,
    add_non_ascii,
    contraction_length,
    divide_whitespace,
    find_groups,
    find_line_breaks,
    find_starts_of_whitespace,
    low_bits,
    size_without_last_whitespace,
    whole_characters,
    write_starts,
)
from lm.kernels.jit import ONE, Bytes, Int32s, helper
from lm.kernels.simd import first_bit, in_range, last_bit


class Cl100kRules(NamedTuple):
    """What differs between the patterns of this family."""

    max_digits: int
    """Most digits of a pretoken."""
    joins_last_whitespace: bool
    """Whether whitespace at the end of the text is one pretoken, even if it has line breaks."""


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
        whitespace = (in_range(buffer, block, 0, SPACE, SPACE) | in_range(buffer, block, 0, 0x09, 0x0D)) & valid
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        tails = np.uint64(0)
        if non_ascii:
            size, letters, digits, whitespace, tails = add_non_ascii(
                buffer, block, end, size, non_ascii, letters, digits, whitespace, classes
            )
            if size < 0:
                return size
            valid = low_bits(size)
        kept_size = size_without_last_whitespace(whitespace, block, size, end)
        if kept_size < size:
            if kept_size == 0:
                count, block, prefix_carry, space_carry = find_starts_of_whitespace(
                    buffer, block, end, classes, rules.joins_last_whitespace, other_carry != 0, 0, starts, count
                )
                if count < 0:
                    return count
                letter_carry = digit_carry = other_carry = added_next = np.uint64(0)
                continue
            size = kept_size
            valid = low_bits(size)
            letters, digits, whitespace, tails = letters & valid, digits & valid, whitespace & valid, tails & valid
        spaces = in_range(buffer, block, 0, SPACE, SPACE) & valid
        continuation = in_range(buffer, block, 0, 0x80, 0xBF) & valid
        others = valid & ~(letters | digits | whitespace)

        # Other characters: a run starts a pretoken, unless a space before it does. It takes the line breaks after it.
        other_starts = others & ~(others << ONE | other_carry) & ~(spaces << ONE | space_carry)
        line_breaks = find_line_breaks(buffer, block) & valid
        taken = line_breaks & ~(line_breaks + (line_breaks & (others << ONE | other_carry)))
        line_breaks &= ~taken
        whitespace &= ~taken

        text = valid & ~whitespace
        blanks, begins, rests = divide_whitespace(whitespace, line_breaks, text, tails)
        if rests and rules.joins_last_whitespace and block + size == end:
            rests &= low_bits(last_bit(text) + 1 if text else 0)
        begins |= rests | other_starts

        # A letter takes the blank before it, or the other character before it if that starts a pretoken.
        prefixes = whole_characters(other_starts, others, continuation) | blanks
        begins |= letters & ~(letters << ONE | letter_carry) & ~(prefixes << ONE | prefix_carry)

        if digits:
            groups, group_digits = find_groups(digits, digit_carry, continuation, group_digits, rules.max_digits)
            begins |= groups

        begins = (begins | added_next) & valid
        added_next = np.uint64(0)
        apostrophes = in_range(buffer, block, 0, APOSTROPHE, APOSTROPHE) & other_starts
        while apostrophes:
            k = first_bit(apostrophes)
            apostrophes &= apostrophes - ONE
            length = contraction_length(buffer, block + k, end, 0x20)
            if length and block + k + length < end:
                if k + length < size:
                    begins |= ONE << np.uint64(k + length)
                else:
                    added_next |= ONE << np.uint64(k + length - size)

        count = write_starts(begins, block, starts, count)
        top = np.uint64(size - 1)
        letter_carry, digit_carry, other_carry = letters >> top, digits >> top, others >> top
        space_carry, prefix_carry = spaces >> top, prefixes >> top
        block += size
    return count
