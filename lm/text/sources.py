"""Text sources: resolve paths, globs and URLs, and open them with any compression."""

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lm.common.errors import TransientError, UserError
from lm.text.demo_corpus import demo_stories
from lm.text.foreign_formats import refuse_binary
from lm.text.local_glob import find_files

BLOCK_BYTES = 1 << 20  # per read
_STREAM_READ_BYTES = 1 << 16  # small: each short stream copies the rest of what was read
_RANGE_BLOCK_BYTES = 8 << 20  # per request, when ranges of a remote file are read in order
ByteRanges = Sequence[tuple[int, int]]  # (start, end) of parts of a file, ascending

# Of web servers, S3, Google, Azure and other file systems; ``memory`` replaces a file at each write.
_MODIFICATION_TIMES = ("Last-Modified", "LastModified", "updated", "last_modified", "mtime", "created")
_RANGED_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}


def _read_to_end(stream: Any) -> Iterator[bytes]:
    while block := stream.read(BLOCK_BYTES):
        yield block


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
    "": _read_to_end,
    ".gz": lambda raw: _read_to_end(gzip.GzipFile(fileobj=raw, mode="rb")),
    ".bz2": lambda raw: _read_streams(raw, bz2.BZ2Decompressor),
    ".xz": lambda raw: _read_streams(raw, lzma.LZMADecompressor),
    ".zst": lambda raw: _read_to_end(import_module("pyarrow").CompressedInputStream(raw, "zstd")),  # slow to import
}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # others are text
_LARGE_ZSTD_WINDOW = "Frame requires too much memory"  # zstd's message for a window above 128 MiB
_ARCHIVES = {".tar", ".tgz", ".zip"}
# Names of exception classes, because their libraries (aiohttp, botocore) may not be installed.
_CONNECTION_ERRORS = {
    *("ConnectionError", "TimeoutError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError"),
}


@dataclass(frozen=True)
class Source:
    """An input file: its URL, its stored size in bytes and the SHA-256 of its stored bytes."""

    url: str
    bytes: int
    sha256: str


def expand_urls(patterns: Iterable[str]) -> list[str]:
    """Resolve paths, globs and URLs to URLs in order. Sorts the matches of a glob and makes local paths absolute.

    A path without a glob need not exist. Raises UserError for a glob without a match.
    """
    urls: list[str] = []
    for pattern in patterns:
        if pattern.startswith(("demo:", "http://", "https://")):
            urls.append(pattern)
            continue
        fs, path = open_filesystem(pattern)
        is_local = isinstance(fs, LocalFileSystem)
        if "::" in pattern and not is_local:
            if glob.has_magic(pattern):
                raise UserError(f"{pattern}: a URL with :: takes no pattern; name each file.")
            urls.append(pattern)
            continue
        try:
            if not glob.has_magic(path) or fs.exists(path):
                matches = [path]
            elif is_local:  # unlike fsspec, follow links to directories, and leave out hidden files
                matches = find_files(path)
            else:
                matches = sorted(name for name, info in fs.glob(path, detail=True).items() if info["type"] == "file")
        except Exception as error:  # each file system has its own exceptions
            raise _source_error(f"{pattern} cannot be listed", error) from error
        if not matches:
            raise UserError(f"No file matches {pattern}.")
        urls += matches if is_local else map(fs.unstrip_protocol, matches)
    return urls


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return (fsspec file system, path) of a path or URL. Raises UserError for an unknown or unusable protocol.

    A name without ``://`` is a local path, also with the ``:`` and ``::`` that are part of fsspec's URLs.

    Directory listings are not cached, because other processes write files too. Timeouts and retries are set so that
    an unresponsive server fails within two minutes. The defaults of s3fs and botocore need more than six minutes.
    """
    options: dict[str, Any] = {"use_listings_cache": False}
    if _is_local(url):
        fs = fsspec.filesystem("file", **options)
        return fs, fs._strip_protocol(url)
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout  # slow to import

        options["client_kwargs"] = {
            # The default timeout ends each download after five minutes, even one that makes progress.
            "timeout": ClientTimeout(total=None, sock_connect=30, sock_read=60),
            "headers": {"Accept-Encoding": "identity"},
            "auto_decompress": not detect_format(url)[1],  # some servers call a .gz file an encoding of its text
        }
    is_s3 = protocol in ("s3", "s3a")
    if is_s3 and "config_kwargs" not in fsspec.config.conf.get(protocol, {}):
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # each file system has its own exceptions
        raise _source_error(f"{url} cannot be used", error) from None
    if is_s3:
        fs.retries = 2  # of 15 seconds each; some operations retry in nested loops
    return fs, path


def _is_local(url: str) -> bool:
    return "://" not in url or url.startswith(("file:", "local:"))


def source_version(url: str) -> tuple[int, str] | None:
    """Return (size in bytes, version string) of a source, without reading it. None if it is missing or has no version.

    For a local file the version is mtime and ctime in nanoseconds and the inode: a copy that preserves the mtime has
    another ctime. Elsewhere it is the ETag or the modification time.
    """
    if url.startswith("demo:"):
        return None
    fs, path = open_filesystem(url)
    try:
        if isinstance(fs, LocalFileSystem):
            stat = Path(path).stat()
            return stat.st_size, f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        info = fs.info(path)
    except Exception:  # missing or unreachable: opening the source reports it
        return None
    version, _ = remote_version(info)
    return (int(info["size"]), version) if version and info.get("size") is not None else None


def remote_version(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the version and the ETag of a file, from the metadata that fsspec has of it. A missing one is empty.

    The version is the ETag, or else the time of the last change. Each store has its own names for them.
    """
    etag = str(info.get("ETag") or info.get("etag") or "")
    times = (info.get(name) for name in _MODIFICATION_TIMES)
    return etag or str(next(filter(None, times), "")), etag


def hash_source(url: str) -> Source:
    """Read a source once and return its size and SHA-256. Raises UserError if it is missing, empty or no text."""
    detect_format(url)  # refuses an archive
    digest, size = hashlib.sha256(), 0
    with open_raw(url) as raw:
        while block := raw.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    if not size:
        raise UserError(f"{url} is empty; remove it from the sources or give it a text.")
    return Source(url, size, digest.hexdigest())


def check_unchanged(source: Source, sha256: str | None = None) -> None:
    """Raise UserError if the bytes of a source are not those that were hashed.

    ``sha256`` is the digest of its bytes as they were read. By default they are read again.
    """
    if (sha256 or hash_source(source.url).sha256) != source.sha256:
        raise _changed(source)


def check_version(source: Source, version: tuple[int, str] | None) -> None:
    """Raise UserError if a source no longer has ``version``. One that has none is read to compare its bytes."""
    current = source_version(source.url)
    if version is None or current is None:
        check_unchanged(source)
    elif current != version:
        raise _changed(source)


def _changed(source: Source) -> UserError:
    return UserError(f"{source.url} changed while the pipeline ran; run it again.")


@contextmanager
def open_raw(url: str, is_ranged: bool = False) -> Iterator[IO[bytes]]:
    """Open the stored bytes of a source, still compressed. Set ``is_ranged`` to seek and read parts of it.

    Raises UserError if it cannot be opened, and TransientError if the connection breaks, also inside the ``with``.
    """
    if url.startswith("demo:"):
        count = url.removeprefix("demo:")
        if not count.isdecimal() or int(count) < 1:
            raise UserError(f"{url!r} names no demo corpus; write demo:N for N stories, such as demo:6000.")
        yield io.BytesIO("".join(demo_stories(int(count))).encode())
        return
    fs, path = open_filesystem(url)
    options = {}
    if is_ranged and not isinstance(fs, LocalFileSystem):
        options["block_size"] = _RANGE_BLOCK_BYTES
    elif url.startswith(("http://", "https://")):
        options["block_size"] = 0  # stream: many web servers ignore byte ranges
    try:
        file = fs.open(path, "rb", **options)
    except Exception as error:  # each file system has its own exceptions
        if isinstance(error, IsADirectoryError):
            raise UserError(f"{url} is a directory; name its files, such as {url.rstrip('/')}/*.txt.") from None
        raise _opening_error(url, error) from error
    with file as raw:
        try:
            yield raw
        except Exception as error:
            if is_transient_error(error):
                raise TransientError(f"{url}: the connection broke during reading: {error!r}") from error
            raise


def _opening_error(url: str, error: Exception) -> UserError:
    # fsspec's HTTP raises FileNotFoundError also for a server error.
    if isinstance(error, FileNotFoundError) and not is_transient_error(error):
        return UserError(f"{url} does not exist.")
    return _source_error(f"{url} cannot be opened", error)


def _source_error(failure: str, error: Exception) -> UserError:
    kind = TransientError if is_transient_error(error) else UserError
    return kind(f"{failure}: {error.__cause__ or error}")


def is_transient_error(error: BaseException) -> bool:
    """Return whether a retry may succeed: ``error`` or its cause is a broken connection or a server error."""
    for candidate in (error, error.__cause__):
        if status := _http_status(candidate):
            return status >= 500 or status in (408, 425, 429)
        names = {kind.__name__ for kind in type(candidate).__mro__}
        if names & _CONNECTION_ERRORS and "ClientConnectorCertificateError" not in names:
            return True
    return False


def is_range_past_end(error: BaseException) -> bool:
    """Return whether ``error`` or its cause says that a byte range begins after the end of its file."""
    return 416 in (_http_status(error), _http_status(error.__cause__))


def _http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an exception of botocore or aiohttp."""
    response = getattr(error, "response", None)  # botocore
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    status = status or getattr(error, "status", None)  # aiohttp
    return status if isinstance(status, int) else None


def detect_format(url: str) -> tuple[str, str]:
    """Return (format, compression suffix) by the file name.

    The format is ``text``, ``jsonl`` or ``parquet``. The suffix is for example ``.gz``; empty if not compressed. Raises
    UserError for an archive, which holds several files.
    """
    name = url
    if "://" in url and not _is_local(url):
        name = next(part for part in url.split("::") if "://" in part)  # the first file of a chain is the text
    if name.startswith(("http://", "https://")):
        name = re.split("[?#]", name)[0]
    elif name.startswith(("s3://", "s3a://")):
        name = name.partition("?versionId=")[0]
    path = Path(name.lower())
    compression = path.suffix if path.suffix in _DECOMPRESSORS else ""
    suffix = path.with_suffix("").suffix if compression else path.suffix
    if suffix in _ARCHIVES:
        raise UserError(f"{url} is an archive; unpack it first and name the files in it.")
    return _FORMATS.get(suffix, "text"), compression


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


@contextmanager
def open_decompressed(url: str, digest: "hashlib._Hash | None" = None) -> Iterator[Iterator[bytes]]:
    """Open a source and yield an iterator over blocks of its decompressed bytes.

    The iterator raises UserError if the file is corrupt or truncated, or begins like a file that is not UTF-8 text. At
    its end, all stored bytes are in ``digest``.
    """
    _, compression = detect_format(url)
    with open_raw(url) as raw:

        def read() -> Iterator[bytes]:
            stored = _StoredFile(raw, digest)
            try:
                yield from refuse_binary(_DECOMPRESSORS[compression](stored), url)
                if compression and not stored.bytes_read:
                    raise EOFError("It is empty, which no compressed file is.")
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                if is_transient_error(error):
                    raise
                if _LARGE_ZSTD_WINDOW in str(error):
                    raise UserError(
                        f"{url} needs a window of more than 128 MiB to decompress. Compress it again without --long: "
                        "zstd -dc --long=31 FILE | zstd > NEW.zst."
                    ) from None
                problem = "is corrupt or truncated" if compression else "cannot be read"
                raise UserError(f"{url} {problem}: {error}") from None

        yield read()


@contextmanager
def open_ranges(url: str, ranges: ByteRanges) -> Iterator[Iterator[bytes]]:
    """Open an uncompressed source and yield an iterator over blocks of its ``ranges``."""
    with open_raw(url, is_ranged=True) as raw:
        yield chain.from_iterable(read_blocks(raw, start, end) for start, end in ranges)


def read_blocks(raw: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes ``start`` to ``end`` of a file in blocks. Stops early at the end of the file."""
    raw.seek(start)
    while start < end and (block := raw.read(min(BLOCK_BYTES, end - start))):
        start += len(block)
        yield block


def is_plain_local_file(url: str) -> bool:
    """Return whether a source is uncompressed plain text on this machine."""
    return detect_format(url) == ("text", "") and is_local_file(url)


def is_local_file(url: str) -> bool:
    """Return whether a source is a file of this machine."""
    return not url.startswith("demo:") and isinstance(open_filesystem(url)[0], LocalFileSystem)


def can_read_in_place(url: str) -> bool:
    """Return whether a source need not be copied.

    It is uncompressed plain text without a byte order mark, and its byte ranges can be read.
    """
    if url.startswith("demo:") or detect_format(url) != ("text", ""):
        return False
    fs, path = open_filesystem(url)
    is_local, is_http = isinstance(fs, LocalFileSystem), url.startswith(("http://", "https://"))
    if not (is_local or is_http or url.partition("://")[0] in _RANGED_PROTOCOLS):
        return False
    options = {} if is_local else {"block_size": _RANGE_BLOCK_BYTES, "cache_type": "none"}
    try:
        with fs.open(path, "rb", **options) as file:
            file.seek(1)  # by a web server's answer to it, ranges can be read
            if (second := file.read(1)) != BOM_UTF8[1:2]:
                return bool(second) or not is_http
            file.seek(0)
            return bool(file.read(len(BOM_UTF8)) != BOM_UTF8)
    except ValueError:  # the server sends the whole file, or no size
        return False
    except Exception as error:  # a broken connection has several exceptions
        raise _opening_error(url, error) from error
