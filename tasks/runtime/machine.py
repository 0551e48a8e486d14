"""Resources that all runs of a user share on one machine: slots for trainings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from lm.common.errors import Stopped, StorageError
from lm.files.cache_dir import cache_directory
from tasks.runtime.context import RunContext

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


@contextmanager
def training_slot(run: RunContext) -> Iterator[None]:
    """Hold one of the ``execution.max_trainings`` slots of this machine; wait until one is free. 0: no limit.

    The slots are file locks of the operating system, which releases them when the process ends. Raises Stopped once
    ``run`` is being stopped.
    """
    max_trainings = run.execution.max_trainings
    if not max_trainings:
        yield
        return
    directory = cache_directory() / "training"
    is_logged = False
    while True:
        for number in range(max_trainings):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                lock = FileLock(directory / f"{number}.lock", timeout=0).acquire()
            except Timeout:
                continue
            except OSError as error:
                raise StorageError(
                    f"{directory}, the directory of the training locks, cannot be used: {error.strerror}. "
                    "Set XDG_CACHE_HOME to a writable directory, or execution.max_trainings to 0."
                ) from None
            with lock:
                yield
            return
        if not is_logged:
            log.info("Waiting for another training on this machine (execution.max_trainings is %d).", max_trainings)
            is_logged = True
        if run.stopping.wait(_POLL_SECONDS):
            raise Stopped("The run is being stopped.")
