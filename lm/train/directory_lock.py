"""The lock of a training's directory: only one training at a time writes there."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lm.common.errors import StorageError, UserError
from lm.distributed.process_group import call_on_rank0

log = logging.getLogger(__name__)

_LOCK_NAME = "training.lock"


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Keep other trainings from writing to ``directory``. Rank 0 holds the lock; all ranks call this together.

    Raises UserError on all ranks if another training has the lock. The operating system frees the lock of a killed
    process. On a file system without locks this only logs a warning.
    """
    with ExitStack() as stack:
        call_on_rank0(lambda: stack.enter_context(_hold(directory / _LOCK_NAME)))
        yield


@contextmanager
def _hold(path: Path) -> Iterator[None]:
    """Hold the lock of a file, and delete the file at the end."""
    descriptor = _lock(path)
    try:
        yield
    finally:
        with suppress(OSError):  # the disk has become read-only; the next training reuses the file
            path.unlink()
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Return the descriptor of the locked file."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"Another program is training in {path.parent}. Stop it or wait for its end, then start this again; "
                "it resumes from the last checkpoint."
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): do not start a second training there.", path, error.strerror)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # the last holder deleted the file after it was opened here
