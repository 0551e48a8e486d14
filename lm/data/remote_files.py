"""Token files on an object store: fetched once per machine while its disk may hold them."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from lm.common.cache import cache_directory
from lm.common.checksum import file_checksum
from lm.common.errors import UserError
from lm.text.retry import NOT_FOUND_ERRORS, retry_request, translate_errors
from lm.text.sources import open_filesystem

log = logging.getLogger(__name__)


def fetch_files(paths: Sequence[str], checksums: Mapping[str, str], max_bytes: int) -> list[str]:
    """Return local copies of files: the first that have ``max_bytes``, and the URLs of the others.

    A local path is returned unchanged. ``checksums`` has the SHA-256 of each URL. Raises UserError if a file is missing
    or has another checksum.
    """
    remaining = max_bytes
    fetched = []
    for path in paths:
        if "://" in path:
            remaining -= file_size(path)
        fetched.append(path if "://" not in path or remaining < 0 else _fetch(path, checksums.get(path, "")))
    return fetched


def fetch_directory(path: str) -> str:
    """Return a local copy of a directory of small files. A local path is returned unchanged.

    Processes of this machine share the copy. It is fetched again only if the list of the files, with their sizes and
    ETags, has changed.
    """
    if "://" not in path:
        return path
    fs, remote_path = open_filesystem(path)
    files = sorted(_request(path, fs.ls, remote_path, detail=True), key=lambda file: str(file["name"]))
    local = cache_directory() / "directories" / hashlib.sha256(repr((path, files)).encode()).hexdigest()[:32]
    local.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{local}.lock"):
        if not local.exists():
            temporary = local.with_suffix(".tmp")
            temporary.mkdir(exist_ok=True)
            for file in files:
                _request(path, fs.get_file, file["name"], str(temporary / str(file["name"]).rpartition("/")[2]))
            temporary.rename(local)
    return str(local)


def file_size(url: str) -> int:
    """Return the size of a file in bytes. Raises UserError if it is missing."""
    fs, path = open_filesystem(url)
    return int(_request(url, fs.size, path))


def _fetch(url: str, checksum: str) -> str:
    """Return the path of a local copy of a file. Processes of this machine share it; one fetches, the others wait."""
    path = cache_directory() / "shards" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}-{checksum[:16]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            fs, remote_path = open_filesystem(url)
            temporary = path.with_suffix(".tmp")
            _request(url, fs.get_file, remote_path, str(temporary))
            if file_checksum(temporary.open("rb")) != checksum:
                raise UserError(f"{url} is damaged. Run the pipeline again: it makes it again.")
            temporary.replace(path)
            log.info("Fetched %s.", url)
    return str(path)


def read_range(url: str, start: int, end: int) -> bytes:
    """Return the bytes ``start`` to ``end`` of a file. Raises UserError if it cannot be read."""
    fs, path = open_filesystem(url)
    return bytes(_request(url, fs.cat_file, path, start=start, end=end))


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
