"""What all runs of one user on one machine share: a directory for files, and turns at training."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lm.errors import UserError

log = logging.getLogger(__name__)

_POLL = 0.5  # seconds


def cache_directory() -> Path:
    """The directory of the project in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill"


@contextmanager
def training_turn(limit: int) -> Iterator[None]:
    """Wait until fewer than ``limit`` trainings run on this machine (0: no limit) and be one of them.

    The locks are the operating system's: they end with the process, however it ends.
    """
    if not limit:
        yield
        return
    directory = cache_directory() / "training"
    is_told = False
    while True:
        for number in range(limit):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                lock = FileLock(directory / f"{number}.lock", timeout=0).acquire()
            except Timeout:
                continue
            except OSError as error:
                raise UserError(
                    f"{directory}, where trainings wait for each other, cannot be used: {error.strerror}. "
                    "Set XDG_CACHE_HOME to a place that can be written, or execution.max_trainings to 0."
                ) from None
            with lock:
                yield
            return
        if not is_told:
            log.info("Waiting for another training on this machine to end (execution.max_trainings is %d).", limit)
            is_told = True
        time.sleep(_POLL)
