"""The steps that a training skips, because the loss or the gradients are NaN or infinite (they overflow)."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import newest_checkpoint
from lm.common.errors import DivergedError, translate_write_errors
from lm.distributed.process_group import get_rank

log = logging.getLogger(__name__)


class SkippedSteps:
    """Counts skipped steps, and averages the losses of the others.

    :meth:`check` runs on the device in every step. The attributes are as of the last :meth:`read`, which waits for the
    device.
    """

    skipped: int
    """Number of skipped steps since the start of the training."""
    consecutive: int
    """Number of them since the last step that was not skipped."""
    smoothed_loss: float | None
    """Moving average of the losses of the steps that were not skipped; None before the first."""

    def __init__(
        self, device: torch.device, skipped: int = 0, consecutive: int = 0, smoothed_loss: float | None = None
    ) -> None:
        self.skipped, self.consecutive, self.smoothed_loss = skipped, consecutive, smoothed_loss
        self._skipped, self._consecutive = (torch.tensor(x, device=device) for x in (skipped, consecutive))
        self._most_consecutive = self._consecutive
        self._smoothed_loss = torch.tensor(math.nan if smoothed_loss is None else smoothed_loss, device=device)
        self._bad_loss = self._bad_norm = torch.tensor(0.0, device=device)  # of the last skipped step

    @classmethod
    def from_description(cls, device: torch.device, description: dict[str, Any]) -> Self:
        """Return the counts as they were when a checkpoint with this description was saved."""
        names = "skipped_steps", "consecutive_skipped_steps", "smoothed_loss"
        return cls(device, *(description[name] for name in names))

    @property
    def description(self) -> dict[str, Any]:
        """The entries of a checkpoint's description."""
        return {
            "skipped_steps": self.skipped,
            "consecutive_skipped_steps": self.consecutive,
            "smoothed_loss": self.smoothed_loss,
        }

    def check(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether to skip a step with this loss and norm of the gradients: bool, a scalar on the device."""
        found_inf = ~torch.isfinite(loss + grad_norm)
        self._skipped = self._skipped + found_inf
        self._consecutive = (self._consecutive + 1) * found_inf
        self._most_consecutive = torch.maximum(self._most_consecutive, self._consecutive)
        previous = self._smoothed_loss
        average = torch.where(previous.isnan(), loss, previous.lerp(loss, 0.1))
        self._smoothed_loss = torch.where(found_inf, previous, average)
        self._bad_loss = torch.where(found_inf, loss, self._bad_loss)
        self._bad_norm = torch.where(found_inf, grad_norm, self._bad_norm)
        return found_inf

    def read(self, step: int, out: Path, finish_checkpoints: Callable[[], None]) -> None:
        """Read the counts after ``step``, and log newly skipped steps.

        Raises DivergedError after too many in a row; its message names the newest checkpoint in ``out``, after
        ``finish_checkpoints`` has waited for one that is being written. A file ``diverged.json`` there then has the
        step and the reason.
        """
        before = self.skipped
        counts = torch.stack([self._skipped, self._consecutive, self._most_consecutive])
        self.skipped, self.consecutive, most_consecutive = counts.tolist()
        smoothed_loss = float(self._smoothed_loss)
        self.smoothed_loss = None if math.isnan(smoothed_loss) else smoothed_loss
        if self.skipped == before:
            return
        reason = f"the loss was {float(self._bad_loss)} and the norm of the gradients {float(self._bad_norm)}"
        if most_consecutive < 5:
            log.warning("Step %s: %s; steps skipped: %d.", f"{step:,}", reason, self.skipped - before)
            return
        finish_checkpoints()
        newest = newest_checkpoint(out)
        if get_rank() == 0:
            with translate_write_errors(out):
                (out / "diverged.json").write_text(json.dumps({"step": step, "reason": reason}), encoding="utf-8")
        raise DivergedError(
            f"At step {step:,} {reason}; {most_consecutive} steps in a row were skipped: the training has diverged. "
            f"Lower train.max_lr; {f'the last good checkpoint is {newest}' if newest else 'no checkpoint was saved'}."
        )
