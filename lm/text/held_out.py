"""The choice of the text held out for validation: some documents by their hash, or the end of the text."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from lm.text.config import DataConfig
from lm.text.pretokenize import find_safe_cut
from lm.text.sources import open_ranges

_WINDOW_BYTES = 1 << 16  # first read backwards from the requested cut
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # all but the first byte of a UTF-8 character


def valid_fraction(config: DataConfig, stored_bytes: int) -> float:
    """Return ``config.valid_fraction``, halved until it is at most ``config.valid_max_bytes`` of ``stored_bytes``.

    Halving keeps the choice of documents stable: it changes only when the sources double, and then to a subset.
    """
    fraction = config.valid_fraction
    while config.valid_max_bytes and fraction * stored_bytes > config.valid_max_bytes:
        fraction /= 2
    return fraction


@dataclass
class DocumentHash:
    """SHA-256 and length in characters of a document without surrounding white space, from its pieces.

    White space is hashed when it is read, and the digest before it kept, so that long white space needs no memory.
    """

    length: int = 0
    _characters_read: int = 0  # from the first non-blank character
    _running: Any = field(default_factory=hashlib.sha256)
    _digest: Any = field(default_factory=hashlib.sha256)  # up to the last non-blank character

    def update(self, piece: str) -> None:
        """Add the next piece of the document."""
        text = piece if self._characters_read else piece.lstrip()
        if words := text.rstrip():
            self._running.update(words.encode())
            self._digest = self._running.copy()
            self.length = self._characters_read + len(words)
        if space := text[len(words) :]:
            self._running.update(space.encode())
        self._characters_read += len(text)

    @property
    def value(self) -> int:
        """First 64 bits of the SHA-256."""
        return int.from_bytes(self._digest.digest()[:8], "big")


def find_cut_before(path: str, offset: int, separator: str) -> int:
    """Return the last byte offset <= ``offset`` at which a cut of a file changes no pretoken; 0 if there is none."""
    window = _WINDOW_BYTES
    while True:
        start = max(0, offset - window)
        with open_ranges(path, [(start, offset)]) as blocks:
            data = b"".join(blocks)
        whole = data.lstrip(_CONTINUATION_BYTES) if start else data  # the window may begin inside a character
        text = whole.decode("utf-8", "replace")  # and end inside one
        cut = find_safe_cut(text, [separator])
        if not start or cut > len(separator):  # a separator may begin before the window
            return start + len(data) - len(whole) + len(text[:cut].encode()) if cut else 0
        window *= 4
