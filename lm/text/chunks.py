"""Split text files into chunks of similar size at special tokens, for parallel work.

Source: CS336 assignment 1 (section 2.5, chunk boundaries), extended to many files and to documents longer than a chunk.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import regex

from lm.common.errors import InvalidUtf8Error, UserError
from lm.files.compression import read_blocks
from lm.text.config import ChunkConfig
from lm.text.pretokenize import GPT2_PATTERN, Pattern, can_cut_before_space
from lm.text.sources import ByteRanges, is_plain_local_file, open_decompressed, open_ranges, open_raw
from lm.text.special_texts import SpecialTextCounter, split_ranges
from lm.text.utf8 import decode_utf8_blocks

_WINDOW_BYTES = 1 << 16  # per read during the search for a cut

# ASCII white space after a character other than white space: always a pretoken boundary of GPT-2's pattern.
_SPACE_AFTER_TEXT = regex.compile(
    rb"(?<![ \t\n\v\f\r])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])(?<!\xe2\x81\x9f)"
    rb"(?<!\xe3\x80\x80)[ \t\n\v\f\r]"
)


@dataclass(frozen=True)
class Range:
    """Bytes ``start`` to ``end`` of text number ``text`` and their SHA-256; ``last``: the text ends with them.

    If ``last`` is false, the text goes on in the chunk's next range. Bytes between two ranges are skipped.
    If ``separator`` is set, it is the only special token in the bytes; ``special_texts`` counts the texts of others.
    """

    text: int
    start: int
    end: int
    last: bool
    sha256: str = ""
    separator: str = ""
    special_texts: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields, without ``separator`` and ``special_texts`` if they are empty."""
        optional = ("separator", "special_texts")
        return {name: value for name, value in asdict(self).items() if value or name not in optional}


def cut_chunks(
    paths: Sequence[str],
    special_tokens: Sequence[str],
    target_bytes: int,
    pattern: Pattern = GPT2_PATTERN,
    ranges: Sequence[ByteRanges] | None = None,
    has_checksums: bool = True,
    rows: Sequence[ByteRanges] | None = None,
    separator: str = "",
) -> Iterator[list[Range]]:
    """Yield the chunks of plain UTF-8 files in order. A chunk is a list of ranges; small files share a chunk.

    A chunk ends at the first special token past ``target_bytes``. A longer document is cut before white space at twice
    the size, which changes no pretoken of GPT-2's pattern; with another pattern a document is never cut. A chunk
    never starts with the blank end of a range. So the last range of a document tells whether its separator is missing.
    Text appended to the last file changes only the last chunks.

    ``ranges`` selects the byte ranges of each file that are its text; all but a file's last end with a special token.
    Default: whole files. In the byte ranges ``rows`` of each file ``separator`` is the only special token.
    Without ``has_checksums``, only the text around the cuts is read, and ``sha256`` is empty.
    Raises UserError if a file is shorter than its ranges.
    """
    specials = [token.encode() for token in special_tokens]
    longest = max(map(len, specials), default=1)
    others = [token for token in special_tokens if token != separator]
    chunk: list[Range] = []
    size = 0
    for number, path in enumerate(paths):
        with open_raw(path, is_ranged=True) as file:
            length = file.seek(0, 2)
            file_ranges = ranges[number] if ranges else [(0, length)]
            if file_ranges and file_ranges[-1][1] > length:
                raise UserError(f"{path} is shorter than it was when it was read; run the pipeline again.")
            for range_start, stop, is_row in split_ranges(file_ranges, rows[number] if rows else []):
                start, tokens = range_start, [separator.encode()] if is_row else specials
                while start < stop:
                    min_end = start + target_bytes - size
                    digest, search_start = hashlib.sha256(), max(start, min(stop, min_end - longest))
                    special_texts = SpecialTextCounter(others if is_row else [])
                    if has_checksums:  # before the search, so that the file is read in order
                        _update_digest(digest, special_texts, file, start, search_start)
                    try:
                        end = _find_cut(file, start, stop, min_end, min_end + target_bytes, tokens, pattern)
                    except EOFError:
                        raise UserError(f"{path} was cut short while it was read; run the pipeline again.") from None
                    if has_checksums:
                        _update_digest(digest, special_texts, file, search_start, end)
                    sha256 = digest.hexdigest() if has_checksums else ""
                    only = (separator, special_texts.total) if special_texts.total else ()
                    chunk.append(Range(number, start, end, end == file_ranges[-1][1], sha256, *only))
                    size += end - start
                    if end < stop or size >= target_bytes:  # the end of a range ends a document
                        yield chunk
                        chunk, size = [], 0
                    start = end
    if chunk:
        yield chunk


def _update_digest(
    digest: "hashlib._Hash", special_texts: SpecialTextCounter, file: IO[bytes], start: int, end: int
) -> None:
    for block in read_blocks(file, start, end):
        digest.update(block)
        special_texts.update(block)


@dataclass(frozen=True)
class FilePart:
    """Bytes ``start`` to ``end`` of a file, or for ``end`` None the whole file, which may be compressed."""

    path: str
    start: int = 0
    end: int | None = None

    def open(self) -> AbstractContextManager[Iterator[bytes]]:
        """Open the part and yield an iterator over blocks of its bytes."""
        if self.end is None:
            return open_decompressed(self.path)
        return open_ranges(self.path, [(self.start, self.end)])

    def locate(self, error: InvalidUtf8Error) -> InvalidUtf8Error:
        """Return ``error`` with the file's path and the offset in the file."""
        return InvalidUtf8Error(error.byte, self.start + error.offset, self.path)


def split_files(
    paths: Sequence[str | Path], special_tokens: Sequence[str], pattern: Pattern = GPT2_PATTERN
) -> Iterator[FilePart]:
    """Split files into parts for threads. Files that are compressed or not local are one part each."""
    for path in map(str, paths):
        if not is_plain_local_file(path):
            yield FilePart(path)
            continue
        for chunk in cut_chunks([path], special_tokens, ChunkConfig().target_bytes, pattern, has_checksums=False):
            yield from (FilePart(path, part.start, part.end) for part in chunk)


def _find_cut(
    file: IO[bytes], start: int, stop: int, min_end: int, min_space: int, specials: Sequence[bytes], pattern: Pattern
) -> int:
    """Return the end of a chunk that continues at byte ``start``: the end of the first special token at ``min_end`` or
    later, or the first white space at ``min_space`` or later, or ``stop``. Raises EOFError if the file ends before."""
    longest = max(map(len, specials), default=1)
    # Overlapping special tokens are ambiguous unless the search starts at a known boundary.
    position = start if _overlap(tuple(specials)) else max(start, min_end - longest)
    special_pattern = regex.compile(b"|".join(map(regex.escape, sorted(specials, key=len, reverse=True))))
    file.seek(position)
    data = b""
    searched = 0  # index in ``data`` before which there is no cut: the last window had more text before it to look at
    while position + len(data) < stop:
        if not (block := file.read(min(_WINDOW_BYTES, stop - position - len(data)))):
            raise EOFError
        data += block
        # A special token that begins at ``limit`` or later may continue in the next block.
        limit = len(data) - longest + 1 if position + len(data) < stop else len(data)
        begin = 0  # of the text after the last special token
        first_space = max(searched, min_space - position)
        for match in special_pattern.finditer(data) if specials else ():
            if match.start() >= limit:
                break
            if cut := _find_space(data, begin, match.start(), first_space, pattern):
                return position + cut
            begin = match.end()
            if position + begin >= min_end:
                return stop if _is_blank(file, position + begin, stop) else position + begin
        if cut := _find_space(data, begin, limit, first_space, pattern):
            return stop if _is_blank(file, position + cut, stop) else position + cut
        kept = max(begin, limit - 4)  # _SPACE_AFTER_TEXT looks back at one character
        searched = max(0, limit - kept)
        position, data = position + kept, data[kept:]
    return stop


def _find_space(data: bytes, begin: int, end: int, minimum: int, pattern: Pattern) -> int:
    """Return the first index >= ``minimum`` at which ``data[begin:end]`` can be cut before white space, or 0."""
    first = max(begin + 1, minimum)
    if not can_cut_before_space(pattern) or first >= end:
        return 0
    match = _SPACE_AFTER_TEXT.search(data, first, end)
    return match.start() if match else 0


@lru_cache
def _overlap(specials: tuple[bytes, ...]) -> bool:
    """Return whether a special token may begin inside an occurrence of another, or of the same token."""
    return any(
        other.startswith(token[i:]) or token[i:].startswith(other)
        for token in specials
        for other in specials
        for i in range(0 if token != other else 1, len(token))
    )


def _is_blank(file: IO[bytes], start: int, stop: int) -> bool:
    """Return whether the bytes ``start`` to ``stop`` are only white space. A character may span two blocks."""
    blocks = read_blocks(file, start, stop)
    return all(text.isspace() for text in decode_utf8_blocks(blocks, "", invalid_utf8="replace"))
