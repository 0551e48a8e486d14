"""Pretoken starts by the pattern of DeepSeek V3: 64 bytes at a time, as masks.

The reference is the ``regex`` pattern in :mod:`lm.text.patterns`. Bit k of a mask stands for byte k of the block; all
bytes of a character have the same bit. The carries hold the last bits of the masks of the block before.

Digits and runs of Chinese and Japanese characters are pieces of their own: no pretoken crosses the ``edges`` of a run
(``cjk``), and whitespace before a piece stays whole. Within a piece:

- **Letters**, marks included: a run starts a pretoken, unless the blank or the control character before it does.
- **Symbols** (punctuation and symbols): a run starts a pretoken, unless the space before it does. It takes the line
  breaks after it. An ASCII symbol alone that starts a pretoken takes the ASCII letters after it instead, as in
  ``(word``; a letter after those, which is not ASCII, starts a pretoken.
- **Controls** (all other characters) match no alternative, except one control directly before a letter: a run starts a
  pretoken, and the last before a letter starts another.
- **Whitespace** is divided as in GPT-4's pattern; see :mod:`lm.kernels.bpe.scanners.cl100k`.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import (
    SPACE,
    class_at,
    classify_non_ascii,
    divide_whitespace,
    find_groups,
    find_line_breaks,
    find_starts_of_whitespace,
    low_bits,
    move_to_first_bytes,
    size_without_last_whitespace,
    write_starts,
)
from lm.kernels.bpe.scanners.character_classes import CJK, CONTROL, DIGIT, LETTER, OTHER
from lm.kernels.jit import ONE, Bytes, Int32s, helper
from lm.kernels.simd import in_range

_PIECES = 1 << DIGIT | 1 << (CJK | LETTER) | 1 << (CJK | OTHER) | 1 << (CJK | CONTROL)


class DeepseekRules(NamedTuple):
    """The parameters of DeepSeek's pattern. The registry chooses the scanner by their type."""

    max_digits: int
    """Most digits of a pretoken."""


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
        spaces = in_range(buffer, block, 0, SPACE, SPACE)
        whitespace = (spaces | in_range(buffer, block, 0, 0x09, 0x0D)) & valid
        controls = (in_range(buffer, block, 0, 0, 0x1F) | in_range(buffer, block, 0, 0x7F, 0x7F)) & valid & ~whitespace
        non_ascii = in_range(buffer, block, 0, 0x80, 0xFF) & valid
        continuation = cjk = np.uint64(0)
        if non_ascii:
            continuation = in_range(buffer, block, 0, 0x80, 0xBF)
            size, more_letters, more_digits, more_whitespace, _, _, _, more_controls, cjk = classify_non_ascii(
                buffer, block, end, size, non_ascii, classes
            )
            if size < 0:
                return size
            letters, digits = letters | more_letters, digits | more_digits
            whitespace, controls = whitespace | more_whitespace, controls | more_controls
        size = size_without_last_whitespace(whitespace, block, size, end)
        if size == 0:
            count, block, prefix_carry, space_carry = find_starts_of_whitespace(
                buffer, block, end, classes, False, taker_carry != 0, _PIECES, starts, count
            )
            if count < 0:
                return count
            letter_carry = digit_carry = control_carry = cjk_carry = symbol_carry = np.uint64(0)
            taker_carry = head_carry = word_carry = np.uint64(0)
            continue
        valid = low_bits(size)
        top = np.uint64(size - 1)
        letters, digits, whitespace, controls = letters & valid, digits & valid, whitespace & valid, controls & valid
        ascii_letters, spaces, cjk = ascii_letters & valid, spaces & valid, cjk & valid
        edges = cjk ^ (cjk << ONE | cjk_carry)

        # Symbols: a run starts a pretoken, unless a space before it does. It takes the line breaks after it.
        symbols = valid & ~(letters | digits | whitespace | controls)
        symbol_starts = symbols & (~(symbols << ONE | symbol_carry) | edges)
        symbol_starts &= ~(spaces << ONE | space_carry) | cjk
        line_breaks = find_line_breaks(buffer, block) & valid
        takers = symbols & ~cjk
        taken = line_breaks & ~(line_breaks + (line_breaks & (takers << ONE | taker_carry)))
        line_breaks &= ~taken
        whitespace &= ~taken

        # The last character of whitespace starts a pretoken only if something else follows in the same piece.
        followers = valid & ~(whitespace | digits | cjk)
        blanks, begins, rests = divide_whitespace(whitespace, line_breaks, followers, continuation)
        begins |= rests | symbol_starts

        # A letter takes the blank or the control before it. ASCII letters after an ASCII symbol are its own.
        prefixes = blanks | controls
        before = letters << ONE | letter_carry | prefixes << ONE | prefix_carry
        letter_starts = letters & (~before | edges)
        heads = symbol_starts & ~non_ascii
        joined = ascii_letters & (heads << ONE | head_carry)
        words = ascii_letters & ~(ascii_letters + (joined | (ascii_letters & word_carry)))
        letter_starts |= letters & ~ascii_letters & (words << ONE | word_carry)
        begins |= letter_starts & ~joined

        # Controls: a run starts a pretoken, and so does the last before a letter, which may be in the next block.
        if controls:
            begins |= controls & (~(controls << ONE | control_carry) | edges)
            before_letters = controls & ((letters & ~edges) >> ONE)
            if block + size < end:
                next_letter = CJK | LETTER if cjk >> top else LETTER  # in the same piece
                if class_at(buffer, block + size, end, classes) == next_letter:
                    before_letters |= controls & (ONE << top)
            begins |= move_to_first_bytes(before_letters, continuation)

        if digits:
            groups, group_digits = find_groups(digits, digit_carry, continuation, group_digits, rules.max_digits)
            begins |= groups

        count = write_starts(begins, block, starts, count)
        letter_carry, digit_carry, control_carry = letters >> top, digits >> top, controls >> top
        cjk_carry, symbol_carry, taker_carry = cjk >> top, symbols >> top, takers >> top
        head_carry, word_carry = heads >> top, words >> top
        space_carry, prefix_carry = spaces >> top, prefixes >> top
        block += size
    return count
