"""Text sources: resolve paths, globs and URLs, and open and hash the files. ``demo:N`` is a generated text."""

import glob
import hashlib
import io
import logging
import os
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, dropwhile
from pathlib import Path
from typing import IO

from fsspec.implementations.local import LocalFileSystem

from lm.common.errors import TransientError, UserError
from lm.files.compression import decompress, detect_format, read_blocks, read_to_end
from lm.files.retry import is_transient_error, source_error
from lm.files.urls import file_version, open_filesystem
from lm.text.demo_corpus import demo_stories

log = logging.getLogger(__name__)

_RANGE_BLOCK_BYTES = 8 << 20  # per request, when ranges of a remote file are read in order
_MAX_SOURCES_NAMED = 6  # in a warning
ByteRanges = Sequence[tuple[int, int]]  # (start, end) of parts of a file, ascending


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
                matches = sorted(set(filter(os.path.isfile, _match_local(path.split("/")))))
            else:
                matches = sorted(name for name, info in fs.glob(path, detail=True).items() if info["type"] == "file")
        except Exception as error:  # each file system has its own exceptions
            raise source_error(f"{pattern} cannot be listed", error) from error
        if not matches:
            raise UserError(f"No file matches {pattern}.")
        urls += matches if is_local else map(fs.unstrip_protocol, matches)
    return urls


def _match_local(parts: list[str]) -> Iterable[str]:
    """Return the local paths that match an absolute pattern, which is split at ``/``, without hidden ones.

    ``**`` stands for any number of directories, as in :func:`glob.glob`. Links to directories are followed, but ``**``
    enters each directory once: a link to a directory above it would otherwise repeat the tree without end.
    """
    if "**" not in parts:
        return glob.glob("/".join(parts))
    first = parts.index("**")
    rest = [*dropwhile(lambda part: part == "**", parts[first:])] or ["*"]
    return (
        path
        for base in glob.glob("/".join(parts[:first]) or "/")
        for directory in _walk(base)
        for path in _match_local([*glob.escape(directory).rstrip("/").split("/"), *rest])
    )


def _walk(base: str) -> Iterator[str]:
    """Yield ``base`` and the directories below it, each once: under its real name if that is below ``base`` too."""
    entered: set[tuple[int, int]] = set()
    directories, links = deque([Path(base)]), deque[Path]()
    while directories or links:
        directory = (directories or links).popleft()
        try:
            status, paths = directory.stat(), sorted(directory.iterdir())
        except OSError:  # no directory, or one that may not be read
            continue
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        yield str(directory)
        for path in filter(os.path.isdir, paths):
            if not path.name.startswith("."):
                (links if path.is_symlink() else directories).append(path)


def hash_source(url: str) -> Source:
    """Read a source once and return its size and SHA-256. Raises UserError if it is missing, empty or no text."""
    detect_format(url)  # refuses an archive
    digest, size = hashlib.sha256(), 0
    with open_raw(url) as raw:
        for block in read_to_end(raw):
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
    current = file_version(source.url)
    if version is None or current is None:
        check_unchanged(source)
    elif current != version:
        raise _changed(source)


def _changed(source: Source) -> UserError:
    return UserError(f"{source.url} changed while the pipeline ran; run it again.")


def warn_about_repeated_sources(train: Sequence[Source], valid: Sequence[Source]) -> None:
    """Log a warning if sources have the same bytes: within the training or the validation text, or in both."""
    for name, sources in (("training", train), ("validation", valid)):
        copies = Counter(source.sha256 for source in sources)
        if repeated := [source.url for source in sources if copies[source.sha256] > 1]:
            log.warning("The %s text holds the same source more than once: %s.", name, list_some(repeated))
    train_digests = {source.sha256 for source in train}
    if shared := [source.url for source in valid if source.sha256 in train_digests]:
        log.warning("Validation text is also training text, so its loss will be too low: %s.", list_some(shared))


def warn_about_equal_texts(
    train: Sequence[tuple[Source, str | None]], valid: Sequence[tuple[Source, str | None]]
) -> None:
    """Log a warning if sources of different bytes hold the same documents, such as a file and its compressed copy.

    Each source has the digest of its documents, or None if it is not known. :func:`warn_about_repeated_sources` warns
    about sources of the same bytes.
    """
    for name, sources in (("training", train), ("validation", valid)):
        stored: dict[str | None, dict[str, str]] = {}  # by the digest of the documents: stored digest → first URL
        for source, digest in sources:
            stored.setdefault(digest, {}).setdefault(source.sha256, source.url)
        for digest, urls in stored.items():
            if digest and len(urls) > 1:
                log.warning("The %s text holds the same documents more than once: %s.", name, list_some(urls.values()))
    known = {digest: source.sha256 for source, digest in train if digest}
    if shared := [source.url for source, digest in valid if known.get(digest or "", source.sha256) != source.sha256]:
        log.warning("Validation text is also training text, so its loss will be too low: %s.", list_some(shared))


def list_some(urls: Iterable[str]) -> str:
    """Return the first of the URLs, each once, and the number of others."""
    names = [*dict.fromkeys(urls)]
    others = len(names) - _MAX_SOURCES_NAMED
    return ", ".join(names[:_MAX_SOURCES_NAMED]) + (f" and {others:,} more" if others > 0 else "")


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


@contextmanager
def open_decompressed(url: str, digest: "hashlib._Hash | None" = None) -> Iterator[Iterator[bytes]]:
    """Open a source and yield an iterator over blocks of its decompressed bytes, see :func:`decompress`."""
    detect_format(url)  # refuses an archive before it is opened
    with open_raw(url) as raw:
        yield decompress(raw, url, digest)


@contextmanager
def open_ranges(url: str, ranges: ByteRanges) -> Iterator[Iterator[bytes]]:
    """Open an uncompressed source and yield an iterator over blocks of its ``ranges``."""
    with open_raw(url, is_ranged=True) as raw:
        yield chain.from_iterable(read_blocks(raw, start, end) for start, end in ranges)


def _opening_error(url: str, error: Exception) -> UserError:
    # fsspec's HTTP raises FileNotFoundError also for a server error.
    if isinstance(error, FileNotFoundError) and not is_transient_error(error):
        return UserError(f"{url} does not exist.")
    return source_error(f"{url} cannot be opened", error)


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
    stores = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")  # have byte ranges
    if not (is_local or is_http or url.partition("://")[0] in stores):
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
