"""The class of each character, as GPT-2's pattern tells them apart."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex

LETTER, DIGIT, WHITE, OTHER = 0, 1, 2, 3


@lru_cache(maxsize=1)
def character_classes() -> npt.NDArray[np.uint8]:
    """The class of each code point (0x110000,), by the Unicode tables of ``regex``."""
    characters = "".join(map(chr, range(0x110000)))
    classes = np.full(0x110000, OTHER, np.uint8)
    for kind, pattern in ((LETTER, r"\p{L}+"), (DIGIT, r"\p{N}+"), (WHITE, r"\s+")):
        for run in regex.finditer(pattern, characters):
            classes[run.start() : run.end()] = kind
    return classes
