"""Pretoken starts by the pattern of DeepSeek V3: 64 bytes at a time, as masks.

The reference is the ``regex`` pattern in :mod:`lm.text.patterns`. Bit k of a mask stands for byte k of the block; all
bytes of a character have the same bit. The carries hold the last bits of the masks of the block before.

Digits and runs of Chinese and Japanese characters are pieces of their own: no pretoken crosses the ``edges`` of a run
(``cjk``), and whitespace before a piece stays whole. Within a piece:

- **Letters**, marks included: a run starts a pretoken, unless the blank or the control character before it does.
- **Symbols** (punctuation and symbols): a run starts a pretoken, unless the space before it does. It takes the line
  breaks after it. An ASCII symbol alone that starts a pretoken takes the ASCII letters after it instead, as in
  ``(word``; a letter after those, which is not ASCII, starts a pretoken.
- **Controls** (all other characters) match nothing but the last before a letter: a run starts a pretoken, and the last
  before a letter starts another.
- **Whitespace** is divided as in GPT-4's pattern; see :mod:`lm.kernels.bpe.cl100k_starts`.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.cl100k_starts import (
    before_line_break,
    find_groups,
    find_line_breaks,
    find_starts_of_whitespace,
)
from lm.kernels.bpe.classes import CJK, CONTROL, DIGIT, LETTER, OTHER, WHITESPACE
from lm.kernels.bpe.pretoken_starts import character_at, class_at, low_bits, move_to_first_bytes, write_starts
from lm.kernels.jit import INVALID_UTF8, Bytes, Int32s, Word, helper
from lm.kernels.simd import first_bit, in_range, last_bit, read

_ONE = np.uint64(1)
_SPACE = 0x20
_PIECES = 1 << DIGIT | 1 << (CJK | LETTER) | 1 << (CJK | OTHER) | 1 << (CJK | CONTROL)


class DeepseekRules(NamedTuple):
    """The parameters of DeepSeek's pattern. :mod:`lm.kernels.bpe.scan` chooses the scanner by their type."""

    max_digits: int
    """Most digits of a pretoken."""


@helper
def classify_non_ascii(
    buffer: Bytes, block: int, end: int, size: int, non_ascii: Word, classes: Bytes
) -> tuple[int, Word, Word, Word, Word, Word]:
    """Classify the non-ASCII characters of the 64-byte block at ``block``.

    Returns (size, letters, digits, whitespace, controls, cjk). ``size`` shrinks if a character crosses the end of the
    block, or is a status below 0.
    """
    letters = digits = whitespace = controls = cjk = np.uint64(0)
    while non_ascii:
        k = first_bit(non_ascii)
        point, length = character_at(buffer, block + k, end)
        if length == 0:
            return INVALID_UTF8 - (block + k), letters, digits, whitespace, controls, cjk
        if k + length > 64:
            size = k
            break
        bits = low_bits(length) << np.uint64(k)
        non_ascii &= ~bits
        character_class = np.int64(read(classes, point))
        if character_class & CJK:
            cjk |= bits
            character_class ^= CJK
        if character_class == LETTER:
            letters |= bits
        elif character_class == DIGIT:
            digits |= bits
        elif character_class == WHITESPACE:
            whitespace |= bits
        elif character_class == CONTROL:
            controls |= bits
    return size, letters, digits, whitespace, controls, cjk


@helper
def find_deepseek_starts(
    buffer: Bytes, begin: int, end: int, classes: Bytes, rules: DeepseekRules, starts: Int32s
) -> int:
    """Write the start of each pretoken of the text ``buffer[begin:end]`` to ``starts`` (end − begin + 64,).

    ``classes`` (0x110000,) is the class of each code point, with CJK. Returns the number of pretokens, or a status
    below 0.
    """
    count = 0
    # Of the byte before. ``taker``: a symbol that takes line breaks. ``head``: a symbol that takes ASCII letters.
    # ``word``: one of those letters. A prefix is a character that a letter after it takes into its pretoken.
    letter_carry = digit_carry = control_carry = cjk_carry = symbol_carry = np.uint64(0)
    taker_carry = head_carry = word_carry = space_carry = prefix_carry = np.uint64(0)
    group_digits = 0
    block = begin
    while block < end:
        size = end - block if end - block < 64 else 64
        valid = low_bits(size)
        ascii_letters = in_range(buffer, block, 0x20, 0x61, 0x7A)
        letters = ascii_letters & valid
        digits = in_range(buffer, block, 0, 0x30, 0x39) & valid
        spaces = in_range(buffer, block, 0, _SPACE, _SPACE)
        whitespace = (spaces | in_range(buffer, block, 0, 0x09, 0x0D)) & valid
        controls = (in_range(buffer, block, 0, 0, 0x1F) | in_range(buffer, block, 0, 0x7F, 0x7F)) & valid & ~whitespace
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        continuation = cjk = np.uint64(0)
        if non_ascii:
            continuation = in_range(buffer, block, 0, 0x80, 0xBF)
            size, more_letters, more_digits, more_whitespace, more_controls, cjk = classify_non_ascii(
                buffer, block, end, size, non_ascii, classes
            )
            if size < 0:
                return size
            letters, digits = letters | more_letters, digits | more_digits
            whitespace, controls = whitespace | more_whitespace, controls | more_controls
        if block + size < end and whitespace >> np.uint64(size - 1) & _ONE:
            text = low_bits(size) & ~whitespace
            if text == 0:
                count, block, prefix_carry, space_carry = find_starts_of_whitespace(
                    buffer, block, end, classes, False, taker_carry != 0, _PIECES, starts, count
                )
                if count < 0:
                    return count
                letter_carry = digit_carry = control_carry = cjk_carry = symbol_carry = np.uint64(0)
                taker_carry = head_carry = word_carry = np.uint64(0)
                continue
            size = last_bit(text) + 1
        valid = low_bits(size)
        top = np.uint64(size - 1)
        letters, digits, whitespace, controls = letters & valid, digits & valid, whitespace & valid, controls & valid
        ascii_letters, spaces, cjk = ascii_letters & valid, spaces & valid, cjk & valid
        edges = cjk ^ (cjk << _ONE | cjk_carry)

        # Symbols: a run starts a pretoken, unless a space before it does. It takes the line breaks after it.
        symbols = valid & ~(letters | digits | whitespace | controls)
        symbol_starts = symbols & (~(symbols << _ONE | symbol_carry) | edges)
        symbol_starts &= ~(spaces << _ONE | space_carry) | cjk
        line_breaks = find_line_breaks(buffer, block) & valid
        takers = symbols & ~cjk
        taken = line_breaks & ~(line_breaks + (line_breaks & (takers << _ONE | taker_carry)))
        line_breaks &= ~taken
        whitespace &= ~taken

        # Whitespace: a run starts a pretoken; so does the rest after its last line break, and the last character of
        # the rest if something else follows in the same piece.
        blanks = whitespace & ~line_breaks
        begins = symbol_starts | whitespace & ~(whitespace << _ONE)
        rests = blanks & (line_breaks << _ONE)
        if rests:
            begins |= rests & ~before_line_break(line_breaks, whitespace)
        begins |= move_to_first_bytes(blanks & ((valid & ~(whitespace | digits | cjk)) >> _ONE), continuation)

        # A letter takes the blank or the control before it. ASCII letters after an ASCII symbol are its own.
        prefixes = blanks | controls
        before = letters << _ONE | letter_carry | prefixes << _ONE | prefix_carry
        letter_starts = letters & (~before | edges)
        heads = symbol_starts & ~non_ascii
        joined = ascii_letters & (heads << _ONE | head_carry)
        words = ascii_letters & ~(ascii_letters + (joined | (ascii_letters & word_carry)))
        letter_starts |= letters & ~ascii_letters & (words << _ONE | word_carry)
        begins |= letter_starts & ~joined

        # Controls: a run starts a pretoken, and so does the last before a letter, which may be in the next block.
        if controls:
            begins |= controls & (~(controls << _ONE | control_carry) | edges)
            before_letters = controls & ((letters & ~edges) >> _ONE)
            if block + size < end:
                next_letter = CJK | LETTER if cjk >> top else LETTER  # in the same piece
                if class_at(buffer, block + size, end, classes) == next_letter:
                    before_letters |= controls & (_ONE << top)
            begins |= move_to_first_bytes(before_letters, continuation)

        if digits:
            runs = digits & ~(digits << _ONE | digit_carry)
            groups, group_digits = find_groups(digits & ~continuation, runs, group_digits, rules.max_digits)
            begins |= groups

        count = write_starts(begins, block, starts, count)
        letter_carry, digit_carry, control_carry = letters >> top, digits >> top, controls >> top
        cjk_carry, symbol_carry, taker_carry = cjk >> top, symbols >> top, takers >> top
        head_carry, word_carry = heads >> top, words >> top
        space_carry, prefix_carry = spaces >> top, prefixes >> top
        block += size
    return count
