"""Compiled kernels: test runs share them, and nothing else of the cache."""

from contextlib import suppress
from pathlib import Path

from lm.files.cache_dir import cache_directory


def cache_with_kernels(folder: Path) -> str:
    """Return a folder for ``XDG_CACHE_HOME`` that shares only the compiled kernels with this process."""
    kernels, own = cache_directory() / "kernels", folder / cache_directory().name
    kernels.mkdir(parents=True, exist_ok=True)
    own.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (own / "kernels").symlink_to(kernels.resolve())
    return str(folder)
