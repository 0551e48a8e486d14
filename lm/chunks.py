"""Cutting texts into chunks of about one size, at special tokens: the units of parallel work.

Source: CS336 assignment 1 (section 2.5, chunk boundaries), extended to many files and to documents longer than a chunk.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import regex

from lm.bounds import FORM, bounded, check_bounds
from lm.corpus import BLOCK, is_referable, open_bytes, open_range, open_raw
from lm.errors import NotUtf8
from lm.pretokens import GPT2_PATTERN

_WINDOW = 1 << 16  # bytes read at once to find where to cut

# ASCII white space after any character but white space: always a boundary of GPT-2's pattern.
_SPACE_AFTER_TEXT = regex.compile(
    rb"(?<![ \t\n\v\f\r])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])(?<!\xe2\x81\x9f)"
    rb"(?<!\xe3\x80\x80)[ \t\n\v\f\r]"
)


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
    sha256: str = ""


def cut_chunks(
    paths: Sequence[str], special_tokens: Sequence[str], target_bytes: int, pattern: str = GPT2_PATTERN
) -> Iterator[list[Range]]:
    """Yield chunks of the plain UTF-8 files ``paths``, in order, each a list of ranges that together cover all bytes.

    Appending to the last file changes the last chunks only. With a custom pattern a document is never cut, however
    long. Small files share a chunk. White space that ends a file stays with the text before it, so that a range shows
    by itself whether a document is open at its end.
    """
    for chunk in cut_ranges(paths, special_tokens, target_bytes, pattern):
        yield [replace(part, sha256=_sha256(paths[part.text], part)) for part in chunk]


def _sha256(path: str, part: Range) -> str:
    digest = hashlib.sha256()
    with open_range(path, part.start, part.end) as blocks:
        for block in blocks:
            digest.update(block)
    return digest.hexdigest()


def cut_ranges(
    paths: Sequence[str], special_tokens: Sequence[str], target_bytes: int, pattern: str = GPT2_PATTERN
) -> Iterator[list[Range]]:
    """The same chunks without their sha256; reads only what lies around the cuts."""
    specials = [token.encode() for token in special_tokens]
    chunk: list[Range] = []
    size = 0
    for number, path in enumerate(paths):
        with open_raw(path) as file:
            total = file.seek(0, 2)
            start = 0
            while start < total:
                end = _find_cut(file, start, total, target_bytes - size, target_bytes, specials, pattern)
                chunk.append(Range(number, start, end, end == total))
                size += end - start
                if end < total or size >= target_bytes:  # the end of a file ends a document
                    yield chunk
                    chunk, size = [], 0
                start = end
    if chunk:
        yield chunk


def stretches(
    paths: Sequence[str | Path], special_tokens: Sequence[str], pattern: str = GPT2_PATTERN
) -> Iterator[tuple[str, Range | None]]:
    """Pieces of files that can be worked on one by one, for threads: (path, the range), or None for a file, such as a
    compressed one, that can only be read as a whole."""
    for path in map(str, paths):
        if not is_referable(path):
            yield path, None
            continue
        for chunk in cut_ranges([path], special_tokens, ChunkConfig().target_bytes, pattern):
            yield from ((path, part) for part in chunk)


def in_file(error: NotUtf8, path: str, part: Range | None) -> NotUtf8:
    """The same error told of the file that a stretch is of."""
    return NotUtf8(error.byte, error.offset + (part.start if part else 0), path)


def open_stretch(path: str, part: Range | None) -> AbstractContextManager[Iterator[bytes]]:
    """Open what :func:`stretches` gave, in blocks of bytes."""
    return open_range(path, part.start, part.end) if part else open_bytes(path)


def _find_cut(
    file: IO[bytes], start: int, total: int, wanted: int, target: int, specials: Sequence[bytes], pattern: str
) -> int:
    """Where the chunk that goes on at ``start`` ends in this file: at the first special token that ends ``wanted``
    bytes later or more, or before white space once it is ``target`` bytes longer; else at the end of the file."""
    longest = max(map(len, specials), default=1)
    # Special tokens that overlap can be told from each other only from a place that is known to be between them.
    place = start if _overlap(specials) else max(start, start + wanted - longest)
    find = regex.compile(b"|".join(map(regex.escape, sorted(specials, key=len, reverse=True)))) if specials else None
    file.seek(place)
    data = b""
    while place + len(data) < total:
        data += file.read(_WINDOW)
        certain = len(data) - longest + 1 if place + len(data) < total else len(data)
        begin = 0  # of the text after the last special token
        for match in find.finditer(data) if find else ():
            if match.start() >= certain:
                break
            if cut := _space(data, begin, match.start(), start + wanted + target - place, pattern):
                return place + cut
            begin = match.end()
            if place + begin >= start + wanted:
                return total if _is_blank(file, place + begin) else place + begin
        if cut := _space(data, begin, certain, start + wanted + target - place, pattern):
            return total if _is_blank(file, place + cut) else place + cut
        kept = max(begin, certain - 4)  # the bytes of a character before white space
        place, data = place + kept, data[kept:]
    return total


def _space(data: bytes, begin: int, end: int, least: int, pattern: str) -> int:
    """The first place from ``least`` on where GPT-2's pattern lets ``data[begin:end]`` be cut; 0 for none."""
    if pattern != GPT2_PATTERN or max(begin + 1, least) >= end:
        return 0
    match = _SPACE_AFTER_TEXT.search(data, max(begin + 1, least), end)
    return match.start() if match else 0


def _overlap(specials: Sequence[bytes]) -> bool:
    """Whether a special token may begin inside another, or inside another's like."""
    return any(
        other.startswith(token[i:]) or token[i:].startswith(other)
        for token in specials
        for other in specials
        for i in range(0 if token != other else 1, len(token))
    )


def _is_blank(file: IO[bytes], place: int) -> bool:
    """Whether nothing but white space follows in the file."""
    file.seek(place)
    while data := file.read(BLOCK):
        if not data.decode("utf-8", "ignore").isspace():
            return False
    return True
