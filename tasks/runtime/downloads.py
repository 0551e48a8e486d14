"""Local copies of files of a remote root, kept between runs in the user's cache.

A copy lies at the same place below ``downloads/<root>`` as the file below its root, so the files of a directory stay
together. It is checked as a file of a local root is: after a change it is downloaded again.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from lm.common.cache import cache_directory
from lm.common.errors import UserError
from tasks.runtime.store import Store

_RETENTION_SECONDS = 24 * 3600  # a run may still use them


def local_path(store: Store, file: Mapping[str, Any], *parts: str) -> Path:
    """Return the path of an intact file: in place on a local root, else of a local copy.

    ``file`` has ``path``, ``bytes`` and ``sha256``. Raises UserError if it is damaged or missing.
    """
    copies = store.copies
    path = Path(copies.path(*parts, file["path"]))
    if not store.is_local:
        with suppress(OSError):
            os.utime(copies.path(*parts))  # remove_old_copies keeps it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):  # groups of chunks in other threads and processes use the same tokenizer
                if copies.find_damaged([file], *parts):
                    store.download(path, *parts, file["path"])
        except OSError as error:
            raise UserError(f"The copy {path} cannot be written: {error.strerror or error}.") from None
    if copies.find_damaged([file], *parts):
        raise UserError(
            f"{store.path(*parts, file['path'])} is damaged or missing. Run the pipeline again: it makes it again."
        )
    return path


def remove_old_copies(max_bytes: int) -> None:
    """Delete copies that were not used in the last 24 hours, the oldest first, until all copies have ``max_bytes``."""
    attempts = []
    for path in cache_directory().glob("downloads/*/*/*/*"):
        with suppress(OSError):  # another process may delete it too
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            attempts.append((path.stat().st_mtime, size, path))
    total = sum(size for _, size, _ in attempts)
    for used, size, path in sorted(attempts):
        if total <= max_bytes or time.time() - used < _RETENTION_SECONDS:
            break
        shutil.rmtree(path, ignore_errors=True)
        total -= size
