"""The four character classes of GPT-2's pattern."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex

LETTER, DIGIT, WHITESPACE, OTHER = 0, 1, 2, 3


@lru_cache(maxsize=1)
def character_classes() -> npt.NDArray[np.uint8]:
    """Return the class of each code point, uint8 (0x110000,), by the Unicode tables of ``regex``."""
    characters = np.arange(0x110000, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    classes = np.full(0x110000, OTHER, np.uint8)
    for character_class, pattern in ((LETTER, r"\p{L}+"), (DIGIT, r"\p{N}+"), (WHITESPACE, r"\s+")):
        for run in regex.finditer(pattern, characters):
            classes[run.start() : run.end()] = character_class
    return classes
