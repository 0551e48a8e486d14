"""Compression and formats of files: decompression (gzip, bzip2, xz, zstd), and recognition by name and first bytes."""

import bz2
import gzip
import hashlib
import io
import lzma
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from lm.common.errors import UserError
from lm.files.retry import is_transient_error

BLOCK_BYTES = 1 << 20  # per read
_STREAM_READ_BYTES = 1 << 16  # small, because a file of many short streams copies the unread rest at each stream's end
_SIGNATURES = {
    b"\x1f\x8b": "compressed by gzip; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; add .zst to its name",
    b"BZh": "compressed by bzip2; add .bz2 to its name",
    b"\xfd7zXZ\x00": "compressed by xz; add .xz to its name",
    b"\x04\x22\x4d\x18": "compressed by lz4; decompress it first",
    b"PAR1": "a Parquet file; name it .parquet",
    b"ARROW1": "an Arrow file; convert it to Parquet",
    b"%PDF-": "a PDF; extract its text first",
    b"PK\x03\x04": "a zip archive or an office document; unpack it or extract its text first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"Rar!\x1a\x07": "a rar archive; unpack it first",
    BOM_UTF16_LE: "UTF-16 or UTF-32; convert it: iconv -f UTF-16 -t UTF-8",
    BOM_UTF16_BE: "UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
}
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".warc", ".wet"), "warc"),
}
_TEXT_FORMATS = {
    "JSON": re.compile(r'\s*(\{\s*"|\[\s*[\[{"])'),
    "HTML or XML": re.compile(r"\s*<(!doctype|html|\?xml)\b", re.IGNORECASE),
}


def detect_format(url: str) -> tuple[str, str]:
    """Return (format, compression suffix) by the file name.

    The format is ``text``, ``jsonl``, ``parquet``, ``html`` or ``warc``. The suffix is for example ``.gz``; empty if
    not compressed. Raises UserError for an archive, which holds several files.
    """
    suffix, compression = split_suffixes(url)
    return _FORMATS.get(suffix, "text"), compression


def split_suffixes(url: str) -> tuple[str, str]:
    """Return (suffix, compression suffix) of a file name, such as ``.csv`` and ``.gz``, in lower case.

    Raises UserError for an archive.
    """
    name = url
    if is_remote(url):
        name = next(part for part in url.split("::") if "://" in part)  # the first file of a chain is the text
    if name.startswith(("http://", "https://")):
        name = re.split("[?#]", name)[0]
    elif name.startswith(("s3://", "s3a://")):
        name = name.partition("?versionId=")[0]
    path = Path(name.lower())
    compression = path.suffix if path.suffix in _DECOMPRESSORS else ""
    suffix = path.with_suffix("").suffix if compression else path.suffix
    if suffix in (".tar", ".tgz", ".zip"):
        raise UserError(f"{url} is an archive; unpack it first and name the files in it.")
    return suffix, compression


def is_remote(url: str) -> bool:
    """Return whether a path or URL names a file system other than the local one."""
    return "://" in url and not url.startswith(("file:", "local:"))


def text_format(url: str, head: str) -> str:
    """Return the format that a plain text has by its start, or a table by its name; empty for prose."""
    if Path(url.lower()).suffix in (".csv", ".tsv"):
        return "CSV"
    return next((name for name, start in _TEXT_FORMATS.items() if start.match(head)), "")


def read_to_end(stream: Any) -> Iterator[bytes]:
    """Yield the rest of a binary file in blocks."""
    while block := stream.read(BLOCK_BYTES):
        yield block


def read_blocks(raw: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes ``start`` to ``end`` of a file in blocks. Stops early at the end of the file."""
    raw.seek(start)
    while start < end and (block := raw.read(min(BLOCK_BYTES, end - start))):
        start += len(block)
        yield block


def decompress(
    raw: IO[bytes], url: str, digest: "hashlib._Hash | None" = None, is_utf8: bool = True
) -> Iterator[bytes]:
    """Yield blocks of the decompressed bytes of a file, whose compression the name in ``url`` says.

    Raises UserError if the file is corrupt or truncated, or, with ``is_utf8``, begins like a file that is not UTF-8
    text. At the end, all stored bytes are in ``digest``.
    """
    compression = detect_format(url)[1]
    stored = _StoredFile(raw, digest)
    try:
        for number, block in enumerate(_DECOMPRESSORS[compression](stored)):
            if not number and is_utf8:
                _refuse_binary(block, url)
            yield block
        if compression and not stored.bytes_read:
            raise EOFError("It is empty, which no compressed file is.")
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if is_transient_error(error):
            raise
        if "Frame requires too much memory" in str(error):  # zstd's message for a window above 128 MiB
            raise UserError(
                f"{url} needs a window of more than 128 MiB to decompress. Compress it again without --long: "
                "zstd -dc --long=31 FILE | zstd > NEW.zst."
            ) from None
        problem = "is corrupt or truncated" if compression else "cannot be read"
        raise UserError(f"{url} {problem}: {error}") from None


def _read_streams(raw: Any, new_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the bytes of streams of bz2 or xz, which zeros may follow. Python's readers end at a damaged stream."""
    decompressor = new_decompressor()
    while True:
        stored = b""
        if decompressor.eof:
            stored = decompressor.unused_data.lstrip(b"\0")
            while not stored and (block := raw.read(_STREAM_READ_BYTES)):
                stored = block.lstrip(b"\0")
            if not stored:
                return
            decompressor = new_decompressor()
        elif decompressor.needs_input and not (stored := raw.read(_STREAM_READ_BYTES)):
            raise EOFError("The last compressed stream has no end.")
        if block := decompressor.decompress(stored, BLOCK_BYTES):
            yield block


# Not fsspec's table: its zstd may be the package zstandard, which does not notice a truncated file.
_DECOMPRESSORS: dict[str, Callable[[Any], Iterator[bytes]]] = {
    "": read_to_end,
    ".gz": lambda raw: read_to_end(gzip.GzipFile(fileobj=raw, mode="rb")),
    ".bz2": lambda raw: _read_streams(raw, bz2.BZ2Decompressor),
    ".xz": lambda raw: _read_streams(raw, lzma.LZMADecompressor),
    ".zst": lambda raw: read_to_end(import_module("pyarrow").CompressedInputStream(raw, "zstd")),  # slow to import
}


class _StoredFile(io.BufferedIOBase):
    """A file that counts the bytes read from it and adds them to ``digest``."""

    def __init__(self, raw: IO[bytes], digest: "hashlib._Hash | None") -> None:
        self._raw, self._digest, self.bytes_read = raw, digest, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        block = self._raw.read(-1 if size is None else size)
        self.bytes_read += len(block)
        if self._digest:
            self._digest.update(block)
        return block


def _refuse_binary(head: bytes, url: str) -> None:
    """Raise UserError if the first block of a file is not that of UTF-8 text."""
    for signature, kind in _SIGNATURES.items():
        if head.startswith(signature) and (signature != b"BZh" or head[4:10] == b"1AY&SY"):  # bzip2's first block
            raise UserError(f"{url} is {kind}.")
    probe = head[:64]
    if len(probe) >= 8 and any(probe[1::2]) != any(probe[::2]):  # ASCII as UTF-16 without a byte order mark
        raise UserError(f"{url} has a NUL in every other byte, as UTF-16 has; convert it to UTF-8 with iconv.")
