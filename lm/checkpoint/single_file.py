"""Checkpoints in a single file: model, optimizer and iteration (CS336 assignment 1, section 5.2)."""

import os
from pathlib import Path

import torch
from torch import nn

from lm.checkpoint.safe_load import PathOrFile, load_optimizer_states, load_weights, read_tensors, save_tensors
from lm.common.errors import UserError
from lm.files.atomic_dir import sync_path


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, out: PathOrFile) -> None:
    """Write model, optimizer and iteration to a path (atomically) or to a binary file object."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
    if not isinstance(out, (str, os.PathLike)):
        torch.save(state, out)
        return
    temporary = Path(f"{os.fspath(out)}.{os.getpid()}.tmp")
    try:
        save_tensors(state, temporary)
        sync_path(temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(src: PathOrFile, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Load a file of :func:`save_checkpoint` into ``model`` and ``optimizer``, and return its iteration.

    Raises UserError if the file is damaged, holds anything but tensors and plain data, or does not fit the model.
    """
    match read_tensors(src):
        case {"model": weights, "optimizer": optimizer_state, "iteration": int(iteration)}:
            load_weights(model, weights, str(src))
            if optimizer is not None:
                load_optimizer_states([optimizer], [optimizer_state], str(src))
            return iteration
        case _:
            raise UserError(f"{src} is not a checkpoint: it lacks model, optimizer or iteration.")
