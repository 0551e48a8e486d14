"""The classes of characters that the pretoken patterns distinguish."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex

LETTER, DIGIT, WHITESPACE, OTHER = 0, 1, 2, 3
LOWER, UPPER, UNCASED, MARK = LETTER, 4, 5, 6  # with case: small letters, capitals, letters without case, marks
CONTROL = 7  # for DeepSeek: what is no letter, digit, whitespace, punctuation or symbol
CJK = 8  # added to the class of a Chinese or Japanese character


@lru_cache(maxsize=1)
def character_classes() -> npt.NDArray[np.uint8]:
    """Return the class of each code point, uint8 (0x110000,), by the Unicode tables of ``regex``."""
    return _classify((LETTER, r"\p{L}+"), (DIGIT, r"\p{N}+"), (WHITESPACE, r"\s+"))


@lru_cache(maxsize=1)
def cased_character_classes() -> npt.NDArray[np.uint8]:
    """Return the same as :func:`character_classes`, but with the classes UPPER, UNCASED and MARK."""
    letters = (LOWER, r"\p{Ll}+"), (UPPER, r"[\p{Lu}\p{Lt}]+"), (UNCASED, r"[\p{Lm}\p{Lo}]+")
    return _classify(*letters, (MARK, r"\p{M}+"), (DIGIT, r"\p{N}+"), (WHITESPACE, r"\s+"))


@lru_cache(maxsize=1)
def cjk_character_classes(cjk: str) -> npt.NDArray[np.uint8]:
    """Return the same as :func:`character_classes`, but marks are LETTER, there is CONTROL, and CJK is added to the
    characters in the set ``cjk``, as in a regular expression."""
    classes = _classify((LETTER, r"[\p{L}\p{M}]+"), (CONTROL, r"\p{C}+"), (DIGIT, r"\p{N}+"), (WHITESPACE, r"\s+"))
    return classes | (_classify((CJK, f"[{cjk}]+")) & np.uint8(CJK))


def _classify(*patterns: tuple[int, str]) -> npt.NDArray[np.uint8]:
    """Return the class of each code point: that of the pattern that matches it, or OTHER."""
    characters = np.arange(0x110000, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    classes = np.full(0x110000, OTHER, np.uint8)
    for character_class, pattern in patterns:
        for run in regex.finditer(pattern, characters):
            classes[run.start() : run.end()] = character_class
    return classes
