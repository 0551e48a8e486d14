"""Checkpoints that are written while the training goes on."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer

from lm.checkpoint.training_snapshot import Buffers, TrainingSnapshot, take_snapshot
from lm.distributed.plan import Parallel
from lm.hardware.memory import free_memory
from lm.model.transformer import TransformerLM
from lm.train.checkpoints import save_checkpoint

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Saves checkpoints in a thread. The training stops for a copy of its state in memory, and for an earlier
    checkpoint that is still being written.

    The copy takes as much memory as the files. If there is too little memory, and if several ranks write a checkpoint
    together, the training stops until the files are written. Use it as a context manager: its end waits for the files.
    """

    def __init__(self, model: TransformerLM, optimizers: list[Optimizer], parallel: Parallel) -> None:
        self._model, self._optimizers, self._parallel = model, optimizers, parallel
        self._buffers: Buffers = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, directory: Path, step: int, description: dict[str, Any], on_saved: Callable[[], None]) -> None:
        """Save a checkpoint of the present state; then call ``on_saved``, maybe in the thread.

        If the ranks share a checkpoint, all call this together. Raises StorageError if this checkpoint cannot be
        written, or if the one before could not be.
        """
        self.wait()
        copy = None if self._parallel.shards_state else self._copy()

        def write() -> None:
            parts = self._model, self._optimizers, step, description, self._parallel, copy
            save_checkpoint(directory, *parts)
            on_saved()

        if copy is None:
            write()
        else:
            self._writing = self._pool.submit(write)

    def _copy(self) -> TrainingSnapshot | None:
        """Return a copy of the training's state, or None if it does not fit into memory."""
        snapshot = take_snapshot(self._model, self._optimizers, self._parallel)
        # Twice: the system keeps the written files in memory until they are on disk.
        if snapshot.nbytes > sum(buffer.nbytes for buffer in self._buffers.values()) + free_memory() // 2:
            return None
        try:
            return snapshot.copy(self._buffers)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            log.debug("The state of the training is not copied: %s", error)
            self._buffers.clear()
            return None

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises StorageError if that failed."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the last checkpoint. Its error is logged if the block ended with another one."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)
