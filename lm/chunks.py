"""Cutting texts into chunks of about one size, at special tokens: the units of parallel work.

Source: CS336 assignment 1 (section 2.5, chunk boundaries), extended to many files and to documents longer than a chunk.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lm.bounds import FORM, bounded, check_bounds
from lm.corpus import BLOCK, open_text
from lm.pretokens import GPT2_PATTERN, cut_safely, special_pattern


@dataclass(frozen=True)
class ChunkConfig:
    """How the text is cut into the units of parallel work."""

    __pydantic_config__ = FORM

    target_bytes: int = bounded(16 << 20, ge=1)
    """Bytes a chunk should have. It ends at the first special token past them; a document that goes on for as much
    again is cut before white space."""

    def __post_init__(self) -> None:
        check_bounds(self, "chunk")


@dataclass(frozen=True)
class Range:
    """Bytes ``start`` to ``end`` of text number ``text``; ``last`` where the text ends there; their sha256."""

    text: int
    start: int
    end: int
    last: bool
    sha256: str


def cut_chunks(
    paths: Sequence[str], special_tokens: Sequence[str], target_bytes: int, pattern: str = GPT2_PATTERN
) -> Iterator[list[Range]]:
    """Yield chunks of the plain UTF-8 files ``paths``, in order, each a list of ranges that together cover all bytes.

    Appending to the last file changes the last chunks only. With a custom pattern a document is never cut, however
    long. Small files share a chunk. White space that ends a file stays with the text before it, so that a range shows
    by itself whether a document is open at its end.
    """
    chunk: list[Range] = []
    size = 0  # bytes of the chunk so far
    is_full = False  # whether the chunk may end here
    for number, path in enumerate(paths):
        start = end = 0
        digest = hashlib.sha256()
        with open_text(path) as blocks:
            for piece, is_document_end in _pieces(blocks, special_tokens, target_bytes, pattern):
                if is_full and not piece.isspace():
                    yield [*chunk, Range(number, start, end, False, digest.hexdigest())]
                    chunk, size, start, digest, is_full = [], 0, end, hashlib.sha256(), False
                data = piece.encode()
                digest.update(data)
                end += len(data)
                size += len(data)
                is_full |= size >= target_bytes and (is_document_end or size >= 2 * target_bytes)
        if end > start:
            chunk.append(Range(number, start, end, True, digest.hexdigest()))
        if size >= target_bytes:  # the end of a file ends a document
            yield chunk
            chunk, size, is_full = [], 0, False
    if chunk:
        yield chunk


def _pieces(
    blocks: Iterable[str], special_tokens: Sequence[str], target_bytes: int, pattern: str
) -> Iterator[tuple[str, bool]]:
    """Cut text wherever a chunk may end: (piece, whether it ends with a special token)."""
    fine = (block[i : i + target_bytes] for block in blocks for i in range(0, len(block), target_bytes))
    for text in cut_safely(fine, special_tokens, pattern, size=min(target_bytes, BLOCK)):
        start = 0
        for match in special_pattern(tuple(special_tokens)).finditer(text) if special_tokens else ():
            yield text[start : match.end()], True
            start = match.end()
        if start < len(text):
            yield text[start:], False
