"""Files by path or URL: which file system a URL names, versions of files, and reads by request."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lm.common.errors import UserError
from lm.files.compression import detect_format, is_remote
from lm.files.retry import NOT_FOUND_ERRORS, is_range_past_end, retry_request, source_error, translate_errors


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return (fsspec file system, path) of a path or URL. Raises UserError for an unknown or unusable protocol.

    A name without ``://`` is a local path, also with the ``:`` and ``::`` that are part of fsspec's URLs.

    Directory listings are not cached, because other processes write files too. Timeouts and retries are set so that
    an unresponsive server fails within two minutes. The defaults of s3fs and botocore need more than six minutes.
    """
    options: dict[str, Any] = {"use_listings_cache": False}
    if not is_remote(url):
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
        raise source_error(f"{url} cannot be used", error) from None
    if is_s3:
        fs.retries = 2  # of 15 seconds each; some operations retry in nested loops
    return fs, path


def file_version(url: str) -> tuple[int, str] | None:
    """Return (size in bytes, version string) of a file, without reading it. None if it is missing or has no version.

    For a local file the version is mtime and ctime in nanoseconds and the inode: a copy that preserves the mtime has
    another ctime. Elsewhere it is the ETag or the modification time.
    """
    fs, path = open_filesystem(url)
    try:
        if isinstance(fs, LocalFileSystem):
            stat = Path(path).stat()
            return stat.st_size, f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        info = fs.info(path)
    except Exception:  # missing or unreachable: opening the file reports it
        return None
    version, _ = remote_version(info)
    return (int(info["size"]), version) if version and info.get("size") is not None else None


def remote_version(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the version and the ETag of a file, from the metadata that fsspec has of it. A missing one is empty.

    The version is the ETag, or else the time of the last change. Each store has its own names for them.
    """
    etag = str(info.get("ETag") or info.get("etag") or "")
    # Of web servers, S3, Google, Azure and other file systems; ``memory`` replaces a file at each write.
    names = ("Last-Modified", "LastModified", "updated", "last_modified", "mtime", "created")
    times = map(info.get, names)
    return etag or str(next(filter(None, times), "")), etag


def file_sizes(urls: Sequence[str]) -> list[int]:
    """Return the size of each file in bytes. Raises UserError if one is missing."""

    def size(url: str) -> int:
        fs, path = open_filesystem(url)
        return int(request(url, fs.size, path))

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(size, urls))


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

    return bytes(request(url, read))


def read_file(path: str) -> bytes:
    """Return the content of a local file or of a URL. Raises OSError or UserError if it cannot be read."""
    if "://" not in path:
        return Path(path).read_bytes()
    fs, remote_path = open_filesystem(path)
    return bytes(request(path, fs.cat_file, remote_path))


def request(url: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the file system of a URL, and retry if the network fails. Raises UserError if the file cannot be read."""
    try:
        return retry_request(translate_errors, url, partial(operation, *arguments, **options))
    except NOT_FOUND_ERRORS as error:
        raise UserError(f"{url} cannot be read: {error}") from None
