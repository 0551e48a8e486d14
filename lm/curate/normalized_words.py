"""Normalized words of a text: lower case, no accents, no punctuation. Near-duplicates and n-grams are found by them.

The plain form works on a text, the tables of a kernel on one character at a time. Both give the same words, because no
step depends on the characters around one, except for Σ, which has one small form here.
"""

import hashlib
import string
import sys
import unicodedata
from functools import cache
from itertools import chain

import numpy as np

from lm.kernels.curation.normalized_text import (
    COUNT_BIT,
    IS_LONG,
    IS_OWN_WORD,
    IS_WHITESPACE,
    LONGEST,
    CharacterTables,
)
from lm.kernels.jit import UInt64s

_HAN = [range(0x3400, 0x4DC0), range(0x4E00, 0xA000), range(0x20000, 0x2F800), range(0x30000, 0x40000)]
_OWN_WORDS = [
    *[range(0x3005, 0x3008), range(0x3041, 0x3100), range(0x31F0, 0x3200)],  # Hiragana and Katakana
    *[range(0xFF66, 0xFFA0), range(0xF900, 0xFB00), range(0x2F800, 0x30000)],  # their variants, and those of Han
    *_HAN,
]
# The code points that may change. No Han character does, and none after the variants of Han.
_MAY_CHANGE = [range(1, 0x3400), range(0x4DC0, 0x4E00), range(0xA000, 0x20000), range(0x2F800, 0x30000)]


class _Substitutes(dict[int, str]):
    """What each character becomes after decomposition."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        is_punctuation = character in string.punctuation or unicodedata.category(character).startswith("P")
        if is_punctuation or unicodedata.combining(character):
            substitute = ""
        elif character == "ς":
            substitute = "σ"
        else:
            substitute = f" {character} " if any(point in points for points in _OWN_WORDS) else character
        return self.setdefault(point, substitute)


_SUBSTITUTES = _Substitutes()


def _replace_characters(text: str) -> str:
    return unicodedata.normalize("NFD", text.lower()).translate(_SUBSTITUTES)


def normalize_words(text: str) -> str:
    """Return the normalized words of ``text``, joined by one space.

    As in assignment 4 of Stanford's CS336: lower case, NFD, without accents (characters with a combining class) and
    punctuation (Unicode's categories P and ASCII's punctuation), white space to one space. In addition, each Chinese
    or Japanese character is a word, because such text has no spaces; and ς becomes σ, as it is inside a word.
    """
    return " ".join(_replace_characters(text).split())


@cache
def character_tables() -> CharacterTables:
    """Return what becomes of each code point, by the Unicode version of Python. The first call takes about 0.2 s."""
    entries = _utf8_entries()
    for own_words in _OWN_WORDS:
        entries[own_words.start : own_words.stop] |= IS_OWN_WORD
    long = bytearray()
    for point, replaced in zip(chain(*_MAY_CHANGE), _replaced_characters(), strict=True):
        character, word = chr(point), replaced.strip()
        if character.isspace():
            entries[point] = entries[ord(" ")] | IS_WHITESPACE
        elif word != character:
            encoded = word.encode()
            entry = len(encoded) << COUNT_BIT | (int(IS_OWN_WORD) if word != replaced else 0)
            if len(encoded) <= LONGEST:
                entry |= int.from_bytes(encoded, "little")
            else:
                entry |= int(IS_LONG) | len(long)
                long += encoded
            entries[point] = entry
    return CharacterTables(entries, np.frombuffer(bytes(long) + bytes(64), np.uint8))


def _utf8_entries() -> UInt64s:
    """Return the entries of all code points as if each stayed as it is: its UTF-8, and the number of bytes."""
    entries: UInt64s = np.arange(sys.maxunicode + 1, dtype=np.uint64)
    entries[:0x80] |= np.uint64(1 << COUNT_BIT)
    for count, begin, end, lead in ((2, 0x80, 0x800, 0xC0), (3, 0x800, 0x10000, 0xE0), (4, 0x10000, 0x110000, 0xF0)):
        for start in range(begin, end, 0x4000):  # few at a time: the rest of the table needs no memory beside it
            points = entries[start : min(start + 0x4000, end)]
            text = count << COUNT_BIT | lead | points >> 6 * (count - 1)
            for k in range(1, count):
                text |= (0x80 | points >> 6 * (count - 1 - k) & 0x3F) << 8 * k
            points[:] = text
    return entries


def _replaced_characters() -> list[str]:
    """Return what becomes of each code point that may change."""
    return _replace_characters("\0".join(map(chr, chain(*_MAY_CHANGE)))).split("\0")


@cache
def words_identity() -> str:
    """Return a digest of what becomes of all characters, which changes with Python's Unicode version, for keys of
    results."""
    return hashlib.sha256("\0".join(_replaced_characters()).encode(errors="surrogatepass")).hexdigest()
