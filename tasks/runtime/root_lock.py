"""Locks of a root: many runs share the root or gc uses it alone, and one process at a time makes an output.

The locks are ``flock`` locks. The operating system releases them when the process ends. Only local roots have them;
:mod:`tasks.runtime.lease` replaces them elsewhere.
"""

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from lm.common.errors import Stopped, StorageError, UserError
from tasks.runtime.context import RunContext
from tasks.runtime.lease import hold_gc_lease, hold_run_lease
from tasks.runtime.store import LOCK_FILE, Store

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


@contextmanager
def use_root(run: RunContext) -> Iterator[None]:
    """Keep gc from deleting while a run uses the root. Wait while gc deletes."""
    with lock_root(run.store), hold_run_lease(run) if run.lease else nullcontext():
        yield


@contextmanager
def own_root(store: Store) -> Iterator[Callable[[], None]]:
    """Keep runs from using the root. Raises UserError if a run uses it.

    Yields a function to call before each deletion: it raises UserError if the root is lost to a run.
    """
    if store.is_local:
        store.require_root()  # the lock file would make the directory of a mistyped root
        with lock_root(store, exclusive=True):
            yield lambda: None
    else:
        with hold_gc_lease(store) as check:
            yield check


@contextmanager
def lock_root(store: Store, exclusive: bool = False) -> Iterator[None]:
    """Hold the lock of a local root: shared by runs, exclusive for deleting. Other roots have no locks.

    A run waits while gc holds the exclusive lock, which is short. Raises UserError if the exclusive lock is not free.
    """
    if not store.is_local:
        yield
        return
    # A run may be of a user who cannot write the file.
    descriptor = _open_lock_file(Path(store.path(LOCK_FILE)), os.O_RDWR if exclusive else os.O_RDONLY)
    try:
        if exclusive and not _try_lock(descriptor, fcntl.LOCK_EX):
            raise UserError(f"A run or another gc uses {store.base}. Try again when it has ended.")
        if not exclusive and not _try_lock(descriptor, fcntl.LOCK_SH):
            log.info("Waiting for textmill gc, which is deleting files below %s.", store.base)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def lock_output(path: Path, name: str, stopping: threading.Event) -> Iterator[None]:
    """Hold the lock of an output while it is made; wait for another run that holds it. The lock file is then deleted.

    If the file system has no locks, two runs may make the same output, which does no harm. Raises Stopped once
    ``stopping`` is set.
    """
    is_logged = False
    while not stopping.is_set():
        descriptor = _open_lock_file(path, os.O_RDWR)
        try:
            if _try_lock(descriptor, fcntl.LOCK_EX, is_required=False):
                if os.fstat(descriptor).st_nlink == 0:  # the last holder deleted the file after it was opened here
                    continue
                try:
                    yield
                finally:
                    with suppress(OSError):  # the root has become read-only; the next holder reuses the file
                        path.unlink()
                return
        finally:
            os.close(descriptor)
        if not is_logged:
            log.info("Waiting for another run that makes the same %s.", name)
            is_logged = True
        stopping.wait(_POLL_SECONDS)
    raise Stopped("The run is being stopped.")


def is_locked(path: Path, is_required: bool = True) -> bool:
    """Return whether a process has a lock on a file. A file that its last holder has deleted has no lock.

    Raises UserError if the file cannot be opened, and, with ``is_required``, if the file system has no locks.
    """
    try:
        # NFS locks a file exclusively only if it is open for writing. A pipe must not be waited for.
        flags = (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_NONBLOCK
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror or error}.") from None
    try:
        return not _try_lock(descriptor, fcntl.LOCK_EX, is_required)
    finally:
        os.close(descriptor)


def _open_lock_file(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_CREAT | flags, 0o666)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None


def _try_lock(descriptor: int, operation: int, is_required: bool = True) -> bool:
    """Return False if another process has the lock. A required exclusive lock needs a file system with locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if operation == fcntl.LOCK_EX and is_required:
            raise UserError(f"The file system has no locks, so a run may be using it: {error.strerror}.") from None
    return True
