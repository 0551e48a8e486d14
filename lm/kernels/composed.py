"""The search for characters that normalization to NFC may change, or join to their neighbours."""

import numpy as np

from lm.kernels.jit import ONE, Bytes, Int, helper, kernel
from lm.kernels.simd import first_bit, in_range, read

_FIRST_LEAD = 0xCC  # of U+0300: all characters below it are composed and join nothing


@helper
def _is_composed(point: Int) -> bool | np.bool_:
    """Return whether a code point from U+0300 on is frequent, starts a character, and is never changed or joined to
    the text before it: whether it is in NFC whatever stands before it. Unknown ones are not."""
    if point < 0x3000:
        return (
            0x388 <= point <= 0x482  # Greek, Cyrillic
            or 0x61B <= point <= 0x64A  # Arabic letters
            or 0xE01 <= point <= 0xE37  # Thai
            or 0x1E00 <= point <= 0x1EFF  # Latin letters, as of Vietnamese
            or 0x2002 <= point <= 0x20C0  # punctuation
            or 0x212C <= point <= 0x2328  # letterlike symbols, arrows, mathematics
            or 0x232B <= point <= 0x2ADB  # symbols, box drawing
        )
    return (
        point <= 0x3029  # CJK punctuation
        or 0x3030 <= point <= 0x3098  # Hiragana
        or 0x309B <= point <= 0xA48C  # Katakana, CJK ideographs, Yi
        or 0xAC00 <= point <= 0xD7A3  # Hangul
        or 0xFE00 <= point <= 0xFE0F  # variation selectors
        or 0xFE30 <= point <= 0xFFFD  # full and half width
        or 0x1F000 <= point <= 0x1FAFF  # emoji
    )


@helper
def _code_point(buffer: Bytes, at: Int, end: Int) -> Int:
    """Return the code point of the character of two to four bytes at ``at``; 0x300, which is not composed, if
    ``end`` cuts it off."""
    lead = read(buffer, at)
    length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    if at + length > end:
        return 0x300
    point = lead & (0x7F >> length)
    for k in range(1, length):
        point = point << 6 | read(buffer, at + k) & 0x3F
    return point


@kernel
def find_uncomposed(buffer: Bytes, start: Int, end: Int) -> Int:
    """Return where the first character of the UTF-8 in ``buffer[start:end]`` is that NFC may change, or join to the
    text before it. Return ``end`` if there is none. Invalid UTF-8 is not always found."""
    block = start
    while block + 64 <= end:
        leads = in_range(buffer, block, 0, _FIRST_LEAD, 0xFF)
        while leads:
            at = block + first_bit(leads)
            leads &= leads - ONE
            if not _is_composed(_code_point(buffer, at, end)):
                return at
        block += 64
    for at in range(block, end):
        if read(buffer, at) >= _FIRST_LEAD and not _is_composed(_code_point(buffer, at, end)):
            return at
    return end
