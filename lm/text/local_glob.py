"""Find local files by a glob pattern that may follow links to directories."""

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import dropwhile
from pathlib import Path


def find_files(pattern: str) -> list[str]:
    """Return the sorted paths of the files that match an absolute pattern, without hidden ones.

    ``**`` stands for any number of directories, as in :func:`glob.glob`. Links to directories are followed, but ``**``
    enters each directory once: a link to a directory above it would otherwise repeat the tree without end.
    """
    return sorted(set(filter(os.path.isfile, _matches(pattern.split("/")))))


def _matches(parts: list[str]) -> Iterable[str]:
    if "**" not in parts:
        return glob.glob("/".join(parts))
    first = parts.index("**")
    rest = [*dropwhile(lambda part: part == "**", parts[first:])] or ["*"]
    return (
        path
        for base in glob.glob("/".join(parts[:first]) or "/")
        for directory in _walk(base)
        for path in _matches([*glob.escape(directory).rstrip("/").split("/"), *rest])
    )


def _walk(base: str) -> Iterator[str]:
    """Yield ``base`` and the directories below it, each once: under its real name if that is below ``base`` too."""
    entered: set[tuple[int, int]] = set()
    directories, links = deque([Path(base)]), deque[Path]()
    while directories or links:
        directory = (directories or links).popleft()
        try:
            status, paths = directory.stat(), sorted(directory.iterdir())
        except OSError:  # no directory, or one that may not be read
            continue
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        yield str(directory)
        for path in filter(os.path.isdir, paths):
            if not path.name.startswith("."):
                (links if path.is_symlink() else directories).append(path)
