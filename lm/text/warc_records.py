"""Records of WARC files, cut out of damaged files too, in little memory.

A library that reads a whole WARC file stops at the first damaged byte. Here damage costs the records that it lies in.
"""

import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator

MAX_RECORD_BYTES = 16 << 20  # Common Crawl cuts pages after 1 or 5 MiB; a page is held in memory a few times
_MAX_HEADER_BYTES = 1 << 16
_MAX_RATIO = 200  # of decompressed to stored bytes; pages have 3 to 20, zeros 1,000
_MIN_BOMB_BYTES = 64 << 20  # decompressed, before the ratio counts
_READ_BYTES = 1 << 14  # of stored bytes, as most compressed records are smaller
_WRITTEN_BYTES = 1 << 18
_MAX_GZIP_HEADER_BYTES = 1 << 17
_HEADER_END = b"\r\n\r\n"
_NEXT_RECORD = b"\nWARC/1."
_NEXT_MEMBER = b"\x1f\x8b\x08"  # gzip's magic number and its only method
_CONTENT_LENGTH = re.compile(rb"^content-length:[ \t]*(\d{1,15})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
AddDamaged = Callable[[str, str], None]
"""Takes the place of damage and its reason."""


class _Buffer:
    """The next bytes of a stream of blocks."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self.data = bytearray()
        self.offset = 0
        """Of ``data`` in the stream."""

    def fill(self, size: int) -> bool:
        """Read until ``data`` has ``size`` bytes; return whether the stream is that long."""
        while len(self.data) < size:
            block = next(self._blocks, None)
            if block is None:
                return False
            self.data += block
        return True

    def drop(self, size: int) -> None:
        """Go forward."""
        del self.data[:size]
        self.offset += size

    def skip_to(self, pattern: bytes, is_found: Callable[[int], bool] = lambda place: True) -> None:
        """Drop at least a byte, and go to the next place of the pattern for which ``is_found``, or to the end."""
        start = 1
        while True:
            place = self.data.find(pattern, start)
            if place < 0:
                self.drop(max(0, len(self.data) - len(pattern) + 1))
                start = 0
                if not self.fill(len(pattern)):
                    self.drop(len(self.data))
                    return
            elif is_found(place):
                self.drop(place)
                return
            else:
                start = place + 1


def split_records(blocks: Iterable[bytes], add_damaged: AddDamaged) -> Iterator[tuple[str, bytes]]:
    """Yield the records of an uncompressed WARC file: (place for messages, bytes of its headers and its content).

    After a damaged record, or one of more than 16 MiB, reading continues at the next line that begins a record.
    """
    buffer = _Buffer(blocks)
    while buffer.fill(1):
        place = f"record at byte {buffer.offset:,}"
        record = _read_record(buffer)
        if isinstance(record, bytes):
            yield place, record
            _drop_line_breaks(buffer)
        else:
            add_damaged(place, record)
            buffer.skip_to(_NEXT_RECORD)
            buffer.drop(1)


def _read_record(buffer: _Buffer) -> bytes | str:
    """Return the record that begins here, after which the buffer then is, or why there is none."""
    buffer.fill(_MAX_HEADER_BYTES)
    header_end = buffer.data.find(_HEADER_END, 0, _MAX_HEADER_BYTES)
    if not buffer.data.startswith(b"WARC/"):
        return "no WARC record begins here"
    length = _CONTENT_LENGTH.search(buffer.data, 0, header_end) if header_end >= 0 else None
    if not length:
        return "its header has no end or no length"
    size = int(length[1])
    if size > MAX_RECORD_BYTES:
        return f"longer than {MAX_RECORD_BYTES >> 20} MiB"
    end = header_end + len(_HEADER_END) + size
    if not buffer.fill(end):
        return "cut short"
    is_last = not buffer.fill(end + 16)
    after = bytes(buffer.data[end : end + 16])
    following = after.lstrip(b"\r\n")
    if not (after.startswith(_HEADER_END) or following.startswith(b"WARC/") or (not following and is_last)):
        return "its length is wrong"
    record = bytes(buffer.data[:end])
    buffer.drop(end)
    return record


def _drop_line_breaks(buffer: _Buffer) -> None:
    while buffer.fill(1) and buffer.data[0] in b"\r\n":
        buffer.drop(1)


def decompress_members(blocks: Iterable[bytes], add_damaged: AddDamaged) -> Iterator[bytes]:
    """Yield the decompressed bytes of gzip's members, of which a WARC file has one a record or one in all.

    After a damaged member, or one of more than 64 MiB that decompresses to more than 200 times its size, reading
    continues at the next member that begins a record.
    """
    buffer = _Buffer(blocks)

    def begins_record(place: int) -> bool:
        buffer.fill(place + _READ_BYTES)
        try:
            start = zlib.decompressobj(31).decompress(bytes(buffer.data[place : place + _READ_BYTES]), 5)
        except zlib.error:
            return False
        return start == b"WARC/"

    while buffer.fill(1):
        place = f"compressed byte {buffer.offset:,}"
        if reason := (yield from _decompress_member(buffer)):
            add_damaged(place, reason)
            buffer.skip_to(_NEXT_MEMBER, begins_record)


def _decompress_member(buffer: _Buffer) -> Generator[bytes, None, str]:
    """Yield the decompressed bytes of the member that begins here. Return why it is damaged; empty if it is not."""
    decompressor = zlib.decompressobj(31)
    num_read, num_written, kept = 0, 0, 0
    while not decompressor.eof:
        buffer.fill(kept + _READ_BYTES)
        stored = bytes(buffer.data[kept : kept + _READ_BYTES])
        try:
            block = decompressor.decompress(stored, _WRITTEN_BYTES)
        except zlib.error as error:
            return str(error)
        if not stored and not block:
            return "cut short"
        # After the end of a member, unconsumed_tail may hold the same bytes as unused_data.
        used = len(stored) - len(decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail)
        num_read, num_written, kept = num_read + used, num_written + len(block), kept + used
        if num_written or kept > _MAX_GZIP_HEADER_BYTES:  # a damaged header may claim the next members as its fields
            buffer.drop(kept)
            kept = 0
        if num_written > max(_MIN_BOMB_BYTES, _MAX_RATIO * num_read):
            return f"decompresses to more than {_MAX_RATIO} times its size"
        if block:
            yield block
    buffer.drop(kept)
    return ""
