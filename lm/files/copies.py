"""Local copies of remote files in the user's cache, and which of them are deleted.

The modification time of a copy's directory is the time of its last use. ``downloads/<root>/<stage>/<key>/<attempt>``
are outputs of stages. A training whose job has URLs copies to ``downloads/shards`` and ``downloads/directories``.
"""

import fcntl
import shutil
import time
from contextlib import ExitStack, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO

from lm.files.cache_dir import cache_directory

_COPIES = ("downloads/*/*/*/*", "downloads/directories/*/", "downloads/shards/*/")
_RETENTION_SECONDS = 24 * 3600  # a run may still use them


def hold_shards() -> None:
    """Keep the copies of token files until this process ends: a training may open one days after its start."""
    path = _shards_lock_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    _hold(path)


@lru_cache
def _hold(path: Path) -> IO[bytes]:
    file = path.open("ab")
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _shards_lock_file() -> Path:
    return cache_directory() / "downloads" / "shards" / ".lock"


def remove_old_copies(max_bytes: int) -> None:
    """Delete copies that were not used in the last 24 hours, the oldest first, until all copies have ``max_bytes``.

    Token files stay while a process of this machine holds them, see :func:`hold_shards`.
    """
    copies = []
    for path in chain.from_iterable(map(cache_directory().glob, _COPIES)):
        with suppress(OSError):  # another process may delete it too
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            copies.append((path.stat().st_mtime, size, path))
    total = sum(size for _, size, _ in copies)
    with ExitStack() as stack:
        are_shards_held = True
        with suppress(OSError):  # a training has locked the token files, or there are none
            file = stack.enter_context(_shards_lock_file().open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            are_shards_held = False
        for used, size, path in sorted(copies):
            if total <= max_bytes or time.time() - used < _RETENTION_SECONDS:
                break
            if path.parent.name == "shards" and are_shards_held:
                continue
            shutil.rmtree(path, ignore_errors=True)
            total -= size
