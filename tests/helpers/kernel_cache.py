"""The part of the cache that test runs share: compiled kernels, parsed code, and an empty database of Prefect."""

from contextlib import suppress
from pathlib import Path

from lm.files.cache_dir import cache_directory


def cache_with_kernels(folder: Path) -> str:
    """Return a folder for ``XDG_CACHE_HOME`` that shares only this part with this process."""
    own = folder / cache_directory().name
    own.mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "code", "prefect"):
        shared = cache_directory() / name
        shared.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (own / name).symlink_to(shared.resolve())
    return str(folder)
