"""Who uses a root: all runs together, or one alone who deletes what none of them needs.

The locks are the operating system's: they end with the process, however it ends. There are none on other than local
roots, so those cannot be used alone.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm.errors import UserError
from tasks.store import Store

log = logging.getLogger(__name__)

LOCK = ".lock"  # its name below the root


@contextmanager
def in_use(store: Store, alone: bool = False) -> Iterator[None]:
    """Use the root. Raises UserError where it is to be used alone and somebody else does; a run that begins while
    somebody uses it alone waits for the end of that, which is near."""
    if not store.is_local:
        if alone:
            raise UserError(
                f"Whether a run uses {store.url()} now, nobody can tell: there are no locks but on local roots. When "
                "none does, delete what textmill gc lists by the means of that store."
            )
        yield
        return
    path = store.path(LOCK)
    try:
        os.makedirs(store.base, exist_ok=True)
        handle = os.open(path, os.O_CREAT | (os.O_RDWR if alone else os.O_RDONLY))  # which may be another user's
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from None
    try:
        if alone and not _take(handle, fcntl.LOCK_EX):
            raise UserError(f"A run or another gc uses {store.base}; try again when it is over.")
        if not alone and not _take(handle, fcntl.LOCK_SH):
            log.info("Waiting for the end of textmill gc, which is cleaning up %s.", store.base)
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def is_held(path: Path) -> bool:
    """Whether some process has a lock on a file."""
    with path.open("rb") as file:
        return not _take(file.fileno(), fcntl.LOCK_EX)


def _take(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some file systems have no locks: so nobody is alone there
        if kind == fcntl.LOCK_EX:
            raise UserError(f"No locks tell whether a run is at work there: {error.strerror}.") from None
    return True
