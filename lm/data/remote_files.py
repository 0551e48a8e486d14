"""Files on an object store: read by requests, or copied once per machine while its disk may hold them.

Copies lie in the user's cache, see :mod:`lm.files.copies`. Processes of a machine share them.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from lm.common.errors import UserError, translate_write_errors
from lm.files.cache_dir import cache_directory
from lm.files.checksum import file_checksum
from lm.files.copies import hold_shards, remove_old_copies
from lm.files.fsync import sync_path
from lm.text.retry import NOT_FOUND_ERRORS, retry_request, translate_errors
from lm.text.sources import is_range_past_end, open_filesystem, source_version

log = logging.getLogger(__name__)

_MAX_CONCURRENT_REQUESTS = 16
_SHARD, _VERIFIED = "tokens.bin", "verified"  # in the copy of a token file; the latter says what was verified


def fetch_files(paths: Sequence[str], checksums: Mapping[str, str], max_bytes: int) -> list[str]:
    """Return local copies of token files: the first that have ``max_bytes``, and the URLs of the others.

    A local path is returned unchanged. ``checksums`` has the SHA-256 of each URL. A copy that has changed is fetched
    again. The copies stay until this process ends; those of earlier trainings may be deleted. Raises UserError if a
    file is missing or has another checksum, and if a copy cannot be written.
    """
    urls = [path for path in paths if "://" in path]
    if not urls:
        return list(paths)
    remove_old_copies(max_bytes)
    with translate_write_errors(cache_directory()):
        hold_shards()
    remaining, copies = max_bytes, dict[str, str]()
    for start in range(0, len(urls), _MAX_CONCURRENT_REQUESTS):
        batch = urls[start : start + _MAX_CONCURRENT_REQUESTS]
        for url, size in zip(batch, file_sizes(batch), strict=True):
            remaining -= size
            if remaining >= 0:
                copies[url] = _fetch_shard(url, checksums.get(url, ""))
        if remaining < 0:
            break
    return [copies.get(path, path) for path in paths]


def fetch_directory(path: str) -> str:
    """Return a local copy of a directory of small files. A local path is returned unchanged.

    It is fetched again only if the list of the files, with their sizes and ETags, has changed. Raises UserError if it
    is missing, and if the copy cannot be written.
    """
    if "://" not in path:
        return path
    fs, remote_path = open_filesystem(path)
    files = sorted(_request(path, fs.ls, remote_path, detail=True), key=lambda file: str(file["name"]))
    sizes = {str(file["name"]).rpartition("/")[2]: file["size"] for file in files}

    def is_intact(copy: Path) -> bool:
        return copy.is_dir() and {file.name: file.stat().st_size for file in copy.iterdir()} == sizes

    with _replace_copy("directories", repr((path, files)), is_intact) as (copy, temporary):
        if temporary:
            for file, name in zip(files, sizes, strict=True):
                _request(path, fs.get_file, file["name"], str(temporary / name))
    return str(copy)


def file_sizes(urls: Sequence[str]) -> list[int]:
    """Return the size of each file in bytes. Raises UserError if one is missing."""

    def size(url: str) -> int:
        fs, path = open_filesystem(url)
        return int(_request(url, fs.size, path))

    with ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS) as pool:
        return list(pool.map(size, urls))


def _fetch_shard(url: str, checksum: str) -> str:
    """Return the path of a local copy of a token file. It is trusted while it is as it was when it was verified."""
    if not checksum:
        raise UserError(f"The job has no checksum of {url}; add its SHA-256 to checksums.")

    def verified(copy: Path) -> str:
        return repr((checksum, source_version(str(copy / _SHARD))))

    def is_intact(copy: Path) -> bool:
        record = copy / _VERIFIED
        return record.is_file() and record.read_text() == verified(copy)

    with _replace_copy("shards", repr((url, checksum)), is_intact) as (copy, temporary):
        if temporary:
            fs, remote_path = open_filesystem(url)
            _request(url, fs.get_file, remote_path, str(temporary / _SHARD))
            if file_checksum((temporary / _SHARD).open("rb")) != checksum:
                raise UserError(f"{url} is damaged. Run the pipeline again: it makes it again.")
            (temporary / _VERIFIED).write_text(verified(temporary))
            log.info("Fetched %s.", url)
    return str(copy / _SHARD)


@contextmanager
def _replace_copy(kind: str, identity: str, is_intact: Callable[[Path], bool]) -> Iterator[tuple[Path, Path | None]]:
    """Yield (directory of a copy, empty directory that replaces it at the end of the ``with`` block).

    Other processes wait. The second is None if the copy is intact. Raises UserError if the disk cannot be written.
    """
    copy = cache_directory() / "downloads" / kind / hashlib.sha256(identity.encode()).hexdigest()[:32]
    temporary = copy.with_suffix(".tmp")
    with translate_write_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        # 256 locks are shared by all copies. One for each copy would stay for ever: to delete a lock is not safe.
        with FileLock(copy.with_name(f"{copy.name[:2]}.lock")):
            with suppress(OSError):
                os.utime(copy)  # remove_old_copies keeps it
            if is_intact(copy):
                yield copy, None
                return
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                yield copy, temporary
                for path in (*temporary.iterdir(), temporary):
                    sync_path(path)
                shutil.rmtree(copy, ignore_errors=True)
                temporary.rename(copy)
                sync_path(copy.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


def read_range(url: str, start: int, end: int) -> bytes:
    """Return the bytes ``start`` to ``end`` of a file, or fewer at its end. Raises UserError if it cannot be read."""
    fs, path = open_filesystem(url)

    def read() -> bytes:
        try:
            return bytes(fs.cat_file(path, start=start, end=end))
        except OSError as error:
            if is_range_past_end(error):
                return b""
            raise

    return bytes(_request(url, read))


def read_file(path: str) -> bytes:
    """Return the content of a local file or of a URL. Raises OSError or UserError if it cannot be read."""
    if "://" not in path:
        return Path(path).read_bytes()
    fs, remote_path = open_filesystem(path)
    return bytes(_request(path, fs.cat_file, remote_path))


def _request(url: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the file system of a URL, and retry if the network fails. Raises UserError if the file cannot be read."""
    try:
        return retry_request(translate_errors, url, partial(operation, *arguments, **options))
    except NOT_FOUND_ERRORS as error:
        raise UserError(f"{url} cannot be read: {error}") from None
