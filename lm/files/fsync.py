"""Writing of files and directories to disk, so that a power failure cannot lose them."""

import os
from pathlib import Path


def sync_path(path: str | Path) -> None:
    """Flush a file's content, or a directory's list of names, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
