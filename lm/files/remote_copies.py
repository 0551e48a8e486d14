"""Local copies of remote files in the user's cache, kept between runs, and which of them are deleted.

The modification time of a copy's directory is the time of its last use. ``downloads/<root>/<stage>/<key>/<attempt>``
are outputs of stages. A training whose job has URLs copies to ``downloads/shards`` and ``downloads/directories``.
Processes of a machine share the copies.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO

from filelock import FileLock

from lm.common.errors import UserError, translate_write_errors
from lm.files.atomic_dir import atomic_directory
from lm.files.cache_dir import cache_directory, prune
from lm.files.checksum import file_checksum
from lm.files.urls import file_sizes, file_version, open_filesystem, request

log = logging.getLogger(__name__)

_BATCH_URLS = 16  # whose sizes are requested at the same time
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
        lock = _shards_lock_file()
        lock.parent.mkdir(parents=True, exist_ok=True)
        _hold(lock)
    remaining, copies = max_bytes, dict[str, str]()
    for start in range(0, len(urls), _BATCH_URLS):
        batch = urls[start : start + _BATCH_URLS]
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
    files = sorted(request(path, fs.ls, remote_path, detail=True), key=lambda file: str(file["name"]))
    sizes = {str(file["name"]).rpartition("/")[2]: file["size"] for file in files}

    def is_intact(copy: Path) -> bool:
        return copy.is_dir() and {file.name: file.stat().st_size for file in copy.iterdir()} == sizes

    with _replace_copy("directories", repr((path, files)), is_intact) as (copy, temporary):
        if temporary:
            for file, name in zip(files, sizes, strict=True):
                request(path, fs.get_file, file["name"], str(temporary / name))
    return str(copy)


def _fetch_shard(url: str, checksum: str) -> str:
    """Return the path of a local copy of a token file. It is trusted while it is as it was when it was verified."""
    if not checksum:
        raise UserError(f"The job has no checksum of {url}; add its SHA-256 to checksums.")

    def verified(copy: Path) -> str:
        return repr((checksum, file_version(str(copy / _SHARD))))

    def is_intact(copy: Path) -> bool:
        record = copy / _VERIFIED
        return record.is_file() and record.read_text() == verified(copy)

    with _replace_copy("shards", repr((url, checksum)), is_intact) as (copy, temporary):
        if temporary:
            fs, remote_path = open_filesystem(url)
            request(url, fs.get_file, remote_path, str(temporary / _SHARD))
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
    with translate_write_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        # 256 locks are shared by all copies. One for each copy would stay for ever: to delete a lock is not safe.
        with FileLock(copy.with_name(f"{copy.name[:2]}.lock")):
            with suppress(OSError):
                os.utime(copy)  # remove_old_copies keeps it
            if is_intact(copy):
                yield copy, None
            else:
                with atomic_directory(copy) as temporary:
                    yield copy, temporary


def remove_old_copies(max_bytes: int) -> None:
    """Delete copies that were not used in the last 24 hours, the oldest first, until all copies have ``max_bytes``.

    Token files stay until the process ends that fetched them: a training may open one days after its start.
    """
    with ExitStack() as stack:
        are_shards_held = True
        with suppress(OSError):  # a training has locked the token files, or no file exists
            file = stack.enter_context(_shards_lock_file().open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            are_shards_held = False
        kinds = ("downloads/*/*/*/*", "downloads/directories/*/", "downloads/shards/*/")
        copies = chain.from_iterable(map(cache_directory().glob, kinds))
        prune(copies, 24 * 3600, max_bytes, lambda copy: are_shards_held and copy.parent.name == "shards")


def _shards_lock_file() -> Path:
    return cache_directory() / "downloads" / "shards" / ".lock"


@lru_cache
def _hold(path: Path) -> IO[bytes]:
    """Lock a file until this process ends."""
    file = path.open("ab")
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file
