"""The project's directory in the user's cache, and the deletion of files that were not used for a while."""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lm.common.errors import UserError


def cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/textmill``, by default ``~/.cache/textmill``. Raises UserError without a home."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "textmill"
    try:
        return Path.home() / ".cache" / "textmill"
    except RuntimeError:  # as of a container's user that /etc/passwd does not list
        raise UserError("This user has no home directory; set HOME or XDG_CACHE_HOME to a writable one.") from None


def prune(
    directories: Iterable[Path],
    unused_seconds: float,
    max_bytes: int = -1,
    is_held: Callable[[Path], bool] = lambda directory: False,
) -> None:
    """Delete the directories that were unused for longest until all have at most ``max_bytes``, by default all.

    The modification time of a directory is the time of its last use. Directories that were used in the last
    ``unused_seconds`` stay, and so do those for which ``is_held`` returns True.
    """
    found = []
    for directory in directories:
        with suppress(OSError):  # another process may delete it too
            size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
            found.append((directory.stat().st_mtime, size, directory))
    total = sum(size for _, size, _ in found)
    for used, size, directory in sorted(found):
        if total <= max_bytes or time.time() - used < unused_seconds:
            break
        if not is_held(directory):
            shutil.rmtree(directory, ignore_errors=True)
            total -= size
