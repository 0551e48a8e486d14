"""Directories that are written atomically: completely or not at all, also if the power fails (fsync)."""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)
# Of a checkpoint: being written, moved aside, being copied.
_TEMPORARY_NAME = re.compile(r"\.(step-[0-9]+|average)\.(?:[0-9]+\.tmp|[0-9]+\.old|copy)")


def sync_path(path: str | Path) -> None:
    """Flush a file's content, or a directory's list of names, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces ``directory`` at the end of the ``with`` block.

    The files are synced to disk first. After an exception ``directory`` is unchanged and the temporary one is deleted.
    """
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    older = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with hold_shared_lock(directory.parent):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                sync_path(path)
            if directory.exists():
                directory.replace(older)  # stays complete until the new directory is in place
            try:
                temporary.replace(directory)
            except OSError:
                if older.exists():
                    older.replace(directory)
                raise
            sync_path(directory.parent)
            shutil.rmtree(older, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def fill_directory(directory: Path, last: str) -> Iterator[Path]:
    """Yield a temporary directory, whose files are in ``directory``, an empty one, after the ``with`` block.

    For a directory that cannot be replaced: somebody works in it, or it is a mount point. The files are synced to disk
    first. The file ``last`` is moved last: if it is there, all files are. After an exception ``directory`` is empty.
    """
    temporary = directory / f".{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        paths = sorted(temporary.iterdir(), key=lambda path: path.name == last)
        for path in paths:
            sync_path(path)
        for path in paths:
            path.replace(directory / path.name)
        sync_path(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def hold_shared_lock(path: Path) -> Iterator[None]:
    """Hold a shared lock on a file or a directory, so that nothing deletes it or its temporary directories: neither
    :func:`remove_abandoned_directories` nor ``textmill gc``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # on a file system without locks nothing is cleaned up
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned_directories(directory: Path) -> None:
    """Delete temporary checkpoint directories that killed processes left in ``directory``.

    A checkpoint that was moved aside is restored if its replacement is missing. Nothing is deleted while any process
    holds :func:`hold_shared_lock`, or on a file system without locks.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in directory.glob(".[a-z]*"):
            match = _TEMPORARY_NAME.fullmatch(path.name)
            if match and path.suffix == ".old" and not (directory / match[1]).exists():
                path.replace(directory / match[1])
            elif match:
                shutil.rmtree(path)
    except OSError as error:
        log.debug("Temporary directories in %s are left alone: %s", directory, error)
    finally:
        os.close(descriptor)
