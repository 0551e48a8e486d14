"""Unicode normalization of text in blocks (UAX 15)."""

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal, cast

import regex

from lm.common.errors import UserError
from lm.text.pretokenize import split_at_cuts

Normalizer = Literal["NFC", "NFD", "NFKC", "NFKD"]

NORMALIZERS: tuple[Normalizer, ...] = ("NFC", "NFD", "NFKC", "NFKD")

# Characters that no form joins to the text before them: ASCII and CJK ideographs. There are more; these are frequent.
_SAFE_CUT = regex.compile(r"(?r)[\x00-\x7f\u4e00-\u9fff]")
_SLICE = 1 << 14  # characters


def check_normalizer(normalizer: str | None) -> str | None:
    """Return ``normalizer``. Raises UserError if it is no normalization form."""
    if normalizer is not None and normalizer not in NORMALIZERS:
        raise UserError(f"The normalizer {normalizer!r} is unknown; use {', '.join(NORMALIZERS)} or none.")
    return normalizer


def is_normalized(text: str, normalizer: str | None) -> bool:
    """Return whether ``text`` is in a normalization form; None: any text is."""
    start = 0
    while normalizer and start < len(text):  # in slices, because Python normalizes all of a text with combining marks
        match = _SAFE_CUT.search(text, start + 1, start + _SLICE) if len(text) > start + _SLICE else None
        end = match.start() if match else len(text)
        if not unicodedata.is_normalized(cast(Normalizer, normalizer), text[start:end]):
            return False
        start = end
    return True


def normalize_text(text: str, normalizer: str | None) -> str:
    """Return ``text`` in a normalization form; None: as it is."""
    return unicodedata.normalize(cast(Normalizer, normalizer), text) if normalizer else text


def normalize_blocks(blocks: Iterable[str], normalizer: str | None) -> Iterator[str]:
    """Yield the normalized concatenation of ``blocks``; a character and its marks may span two blocks.

    Holds text back until a character follows that normalization cannot join to it.
    """
    if normalizer is None:
        yield from blocks
        return

    def find_cut(text: str) -> int:
        match = _SAFE_CUT.search(text, 1)
        return match.start() if match else 0

    for piece in split_at_cuts(blocks, find_cut):
        yield normalize_text(piece, normalizer)
