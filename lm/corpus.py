"""Sources of text: finding them by path, glob or URL, opening them whatever their compression, their documents."""

import bz2
import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from lm.bounds import FORM, bounded, check_bounds
from lm.demo_corpus import demo_stories
from lm.errors import NotUtf8, Unreachable, UserError
from lm.pretokens import END_OF_TEXT

BLOCK = 1 << 20  # bytes read at once

_DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda raw: pa.CompressedInputStream(raw, "zstd"),  # notices a truncated stream, as the others do
}
_BROKEN = {"ConnectionError", "TimeoutError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError"}
_CORRUPT = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is read."""

    __pydantic_config__ = FORM

    train: list[str] = field(default_factory=lambda: ["demo:6000"], metadata={"min_length": 1})
    """Training text: paths, globs or URLs (file, https, s3, memory), plain or .gz .bz2 .xz .zst. .jsonl and .parquet
    hold one document a row; any other file is text, its documents ended by the separator. demo:N is N stories that the
    project makes up."""
    valid: list[str] = field(default_factory=list)
    """Validation text, likewise. Empty: a fraction of the training documents is set aside instead."""
    valid_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the documents, chosen by their hash, that is the validation text when valid is empty. 0: none."""
    separator: str = field(default=END_OF_TEXT, metadata={"min_length": 1})
    """Special token that ends a document."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) that holds the document."""
    invalid_utf8: Literal["error", "replace"] = "error"
    """What to do with bytes that are not UTF-8: stop and say where, or replace them by U+FFFD and count them."""
    separator_in_document: Literal["error", "remove"] = "error"
    """What to do when a jsonl or parquet document contains the separator: stop and name it, or remove and count it."""

    def __post_init__(self) -> None:
        if not self.train:
            raise UserError("data.train is empty; name at least one file, glob or URL.")
        if not self.separator:
            raise UserError("data.separator is empty; name the token that ends a document, such as <|endoftext|>.")
        check_bounds(self, "data")

    @property
    def identity(self) -> dict[str, Any]:
        """How the text is read, not where it lies: the sources found there are told apart by their content."""
        return {name: value for name, value in asdict(self).items() if name not in ("train", "valid")}


@dataclass(frozen=True)
class Source:
    """One input file as it was found: where, how long in bytes, and the sha256 of its stored bytes."""

    url: str
    bytes: int
    sha256: str


def expand(patterns: Iterable[str]) -> list[str]:
    """Resolve paths, globs and URLs to single URLs in order (a glob's matches sorted); local paths become absolute.

    A path without a glob is taken as it is, existing or not. Raises UserError for a glob without a match.
    """
    urls: list[str] = []
    for pattern in patterns:
        if pattern.startswith(("demo:", "http://", "https://")):
            urls.append(pattern)
            continue
        fs, path = _filesystem(pattern)
        try:
            is_literal = not glob.has_magic(path) or fs.exists(path)
            found = [path] if is_literal else sorted(str(match) for match in fs.glob(path) if fs.isfile(match))
        except Exception as error:  # file systems have errors of their own
            kind = Unreachable if is_network_failure(error) else UserError
            raise kind(f"{pattern} cannot be looked up: {error}") from error
        if not found:
            raise UserError(f"No file matches {pattern}.")
        urls += found if isinstance(fs, LocalFileSystem) else map(fs.unstrip_protocol, found)
    return urls


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        return connect(url)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"{url} cannot be read: {error}") from None


def connect(url: str) -> tuple[Any, str]:
    """(file system, path) of a URL. No listings are remembered, as others write there too; a server that does not
    answer is given up: in a minute or two, where by their defaults s3fs and botocore make six or more of it."""
    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout  # slow to import

        # The default ends every download after five minutes, however well it goes.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=60)}
    is_s3 = protocol in ("s3", "s3a")
    if is_s3 and "config_kwargs" not in fsspec.config.conf.get(protocol, {}):
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    fs, path = fsspec.core.url_to_fs(url, **options)
    if is_s3:
        fs.retries = 2  # each waits for 15 seconds, and some operations try again as often as the requests they make
    return fs, path


def version(url: str) -> tuple[int, str] | None:
    """(size in bytes, a mark that changes with the content: mtime or etag) of a source; None where it is missing or
    gives no such mark."""
    if url.startswith("demo:"):
        return None
    fs, path = _filesystem(url)
    try:
        info = fs.info(path)
    except Exception:  # missing, or out of reach in a file system's own words: opening it will tell
        return None
    mark = info.get("ETag") or info.get("mtime") or info.get("LastModified") or info.get("Last-Modified")
    return (int(info["size"]), str(mark)) if mark and info.get("size") is not None else None


def fingerprint(url: str) -> Source:
    """Read a source's stored bytes once; raises UserError when it is missing, empty or unreadable."""
    digest, size = hashlib.sha256(), 0
    with open_raw(url) as raw:
        while block := raw.read(BLOCK):
            digest.update(block)
            size += len(block)
    if not size:
        raise UserError(f"{url} is empty; remove it from the sources or give it a text.")
    return Source(url, size, digest.hexdigest())


@contextmanager
def open_raw(url: str) -> Iterator[IO[bytes]]:
    """Open the stored bytes of a source; raises UserError where that fails."""
    if url.startswith("demo:"):
        count = url.removeprefix("demo:")
        if not count.isdecimal() or int(count) < 1:
            raise UserError(f"{url!r} names no demo corpus; write demo:N for N stories, such as demo:6000.")
        yield io.BytesIO("".join(demo_stories(int(count))).encode())
        return
    fs, path = _filesystem(url)
    # Streamed, as many web servers know no byte ranges; Parquet is read from its end and needs them.
    is_streamed = url.startswith(("http://", "https://")) and split_suffixes(url)[0] != "parquet"
    try:
        opened = fs.open(path, "rb", **({"block_size": 0} if is_streamed else {}))
    except FileNotFoundError as error:
        if is_network_failure(error):  # fsspec's HTTP takes every answer but success for a missing file
            raise Unreachable(f"{url} cannot be reached: {error.__cause__}") from error
        raise UserError(f"{url} does not exist.") from None
    except IsADirectoryError:
        raise UserError(f"{url} is a directory; name its files, such as {url.rstrip('/')}/*.txt.") from None
    except Exception as error:  # file systems have errors of their own, such as botocore's for missing credentials
        kind = Unreachable if is_network_failure(error) else UserError
        raise kind(f"{url} cannot be opened: {error}") from error
    with opened as raw:
        try:
            yield raw
        except Exception as error:
            if is_network_failure(error):
                raise Unreachable(f"{url}: the connection broke while it was read: {error!r}") from error
            raise


def is_network_failure(error: BaseException) -> bool:
    """Whether an error, or the one behind it, may not come again: a broken connection, a server in trouble or busy."""
    for found in (error, error.__cause__):
        response = getattr(found, "response", None)  # botocore's
        answer = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        status = answer or getattr(found, "status", None)  # aiohttp's
        if isinstance(status, int):
            return status >= 500 or status in (408, 425, 429)
        kinds = {kind.__name__ for kind in type(found).__mro__}  # named, as their libraries may not be installed
        if kinds & _BROKEN and "ClientConnectorCertificateError" not in kinds:
            return True
    return False


def split_suffixes(url: str) -> tuple[str, str]:
    """(kind, compression) by the name's end: kind is ``text``, ``jsonl`` or ``parquet``; compression such as ``.gz``
    or empty."""
    path = Path((url.partition("?")[0] if "://" in url else url).lower())
    compression = path.suffix if path.suffix in _DECOMPRESSORS else ""
    inner = path.with_suffix("").suffix if compression else path.suffix
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(inner, "text"), compression


@contextmanager
def open_bytes(url: str) -> Iterator[Iterator[bytes]]:
    """Open a source and give its decompressed bytes in blocks; a corrupt or truncated file raises UserError."""
    _, compression = split_suffixes(url)
    with open_raw(url) as raw:

        def blocks() -> Iterator[bytes]:
            try:
                with _DECOMPRESSORS[compression](raw) if compression else raw as stream:
                    while block := stream.read(BLOCK):
                        yield block
            except _CORRUPT as error:
                raise UserError(f"{url} is corrupt or truncated: {error}. Fetch or compress it again.") from None
            except OSError as error:
                if is_network_failure(error):
                    raise
                what = "is corrupt or truncated" if compression else "cannot be read"
                raise UserError(f"{url} {what}: {error}") from None

        yield blocks()


@dataclass
class Tally:
    """What was met while reading: documents, replaced invalid byte sequences, separators removed from documents; and
    ``lengths``, at k the number of documents with 2^(k/4) characters or more, and fewer than 2^((k+1)/4)."""

    documents: int = 0
    replaced: int = 0
    separators_removed: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * 256)

    def add(self, length: int) -> None:
        """Count a document of so many characters."""
        self.documents += 1
        self.lengths[int(4 * math.log2(max(1, length)))] += 1


def decode_blocks(
    blocks: Iterable[bytes], name: str, invalid_utf8: str = "error", tally: Tally | None = None
) -> Iterator[str]:
    """Decode UTF-8 blocks to text. An invalid byte raises UserError with its offset in ``name``, or with
    ``invalid_utf8="replace"`` becomes U+FFFD and is counted in ``tally``."""
    pending, offset = b"", 0
    for block in chain(blocks, [None]):  # after the last, what is pending is invalid
        data = pending + (block or b"")
        try:
            text, used = codecs.utf_8_decode(data, "strict", block is None)
        except UnicodeDecodeError as error:
            if invalid_utf8 == "error":
                raise NotUtf8(data[error.start], offset + error.start, name) from None
            text, used = codecs.utf_8_decode(data, "replace", block is None)
            if tally:
                tally.replaced += text.count("�") - data[:used].count("�".encode())
        pending = data[used:]
        offset += used
        if text:
            yield text


@contextmanager
def open_range(url: str, start: int, end: int) -> Iterator[Iterator[bytes]]:
    """Open the bytes ``start`` to ``end`` of a plain file and give them in blocks."""
    with open_raw(url) as raw:
        raw.seek(start)
        yield _read_blocks(raw, end - start)


def _read_blocks(raw: IO[bytes], length: int) -> Iterator[bytes]:
    while length > 0 and (block := raw.read(min(BLOCK, length))):
        length -= len(block)
        yield block


def pieces(url: str, config: DataConfig, tally: Tally) -> Iterator[str]:
    """Yield the text of a source in pieces. The separator ends each document, and stands nowhere but at the end of a
    piece; the last document of a text that lacks it gets it. A document of text, which may be longer than memory, comes
    in many pieces; one of a row in one.

    Text keeps every byte, so white space after the last separator comes last without one. Raises UserError for what
    cannot be read; counts into ``tally``.
    """
    kind, compression = split_suffixes(url)
    if kind == "text":
        yield from _text_pieces(url, config, tally)
        return
    if kind == "parquet" and compression:
        raise UserError(f"{url}: Parquet is compressed inside; decompress the file itself.")
    rows = _jsonl_rows(url, config, tally) if kind == "jsonl" else _parquet_rows(url, config.text_field)
    for place, document in rows:
        if config.separator in document:
            if config.separator_in_document == "error":
                raise UserError(
                    f"{url}, {place}: the document contains the separator {config.separator}. "
                    "Choose another separator, or set data.separator_in_document to remove."
                )
            while config.separator in document:  # what is left of a removed one may join to another
                tally.separators_removed += document.count(config.separator)
                document = document.replace(config.separator, "")
        tally.add(len(document))
        yield document + config.separator


def _text_pieces(url: str, config: DataConfig, tally: Tally) -> Iterator[str]:
    length, is_blank = 0, True  # of the document so far
    tail = ""  # its last characters, in which a separator may have begun
    with open_bytes(url) as blocks:
        for text in decode_blocks(blocks, url, config.invalid_utf8, tally):
            *ends, rest = (tail + text).split(config.separator)
            for end in ends:
                tally.add(length + len(end))
                yield end + config.separator
                length, is_blank = 0, True
            cut = max(0, len(rest) - len(config.separator) + 1)
            piece, tail = rest[:cut], rest[cut:]
            if piece:
                length += cut
                is_blank = is_blank and piece.isspace()
                yield piece
    if tail and is_blank and tail.isspace():
        yield tail
    elif tail or not is_blank:
        tally.add(length + len(tail))
        yield tail + config.separator


def _jsonl_rows(url: str, config: DataConfig, tally: Tally) -> Iterator[tuple[str, str]]:
    with open_bytes(url) as blocks:
        for number, line in enumerate(_lines(decode_blocks(blocks, url, config.invalid_utf8, tally)), start=1):
            if not line.strip():
                continue
            place = f"line {number:,}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{url}, {place}: not JSON: {error}.") from None
            if not isinstance(row, dict) or not isinstance(row.get(config.text_field), str):
                raise UserError(f"{url}, {place}: no text field {config.text_field!r}; set data.text_field.")
            yield place, row[config.text_field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for block in blocks:
        *whole, rest = (rest + block).split("\n")
        yield from whole
    yield rest


def _parquet_rows(url: str, text_field: str) -> Iterator[tuple[str, str]]:
    with open_raw(url) as raw:
        try:
            file = pq.ParquetFile(raw)
            if text_field not in file.schema_arrow.names:
                raise UserError(
                    f"{url}: no column {text_field!r} among {file.schema_arrow.names}; set data.text_field."
                )
            if file.schema_arrow.field(text_field).type not in (pa.string(), pa.large_string()):
                raise UserError(f"{url}: column {text_field!r} is not text; set data.text_field.")
            batches = file.iter_batches(columns=[text_field], batch_size=1024)
            rows = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for number, document in enumerate(rows, start=1):
                if document is not None:
                    yield f"row {number:,}", document
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if is_network_failure(error):
                raise
            raise UserError(f"{url} is not a readable Parquet file: {error}") from None


def is_referable(url: str) -> bool:
    """Whether a source can be used where it lies: a plain text file on this machine, not compressed."""
    if url.startswith("demo:") or split_suffixes(url) != ("text", ""):
        return False
    return isinstance(_filesystem(url)[0], LocalFileSystem)
