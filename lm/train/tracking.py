"""Metrics of a training: log lines, ``metrics.jsonl``, ``samples.jsonl`` and experiment trackers."""

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lm.checkpoint.training_checkpoint import ROW_FILES
from lm.common.errors import UserError
from lm.train.metrics_file import append_rows
from lm.train.throughput import Throughput

log = logging.getLogger(__name__)


class Tracker:
    """Writes metrics and samples to files in ``directory`` and to the ``trackers`` by name.

    ``tensorboard`` writes to ``tensorboard/`` in the directory; rows of an interrupted run after ``step`` are hidden.
    ``wandb`` and ``trackio`` are modules with ``init``, ``log`` and ``finish``. Raises UserError if a tracker is not
    installed or does not start. A tracker that fails later is removed with a warning.
    """

    def __init__(self, directory: Path, trackers: Sequence[str], config: dict[str, Any], step: int) -> None:
        self.directory = directory
        self._trackers: dict[str, Any] = {}
        if step == 0:  # an attempt without a checkpoint may have left rows
            for name in ROW_FILES:
                (directory / name).unlink(missing_ok=True)
        for name in trackers:
            try:
                if name == "tensorboard":
                    self._trackers[name] = _TensorBoard(directory / name, step)
                else:
                    module = import_module(name)
                    module.init(project="textmill", name=directory.name, config=config)
                    self._trackers[name] = module
            except ImportError as error:
                raise UserError(
                    f"execution.trackers names {name}, which cannot be imported ({error}); install it "
                    f"(pip install {name}) or leave it out."
                ) from None
            except Exception as error:  # each tracker has its own, e.g. for a missing key
                raise UserError(f"execution.trackers names {name}, which does not start: {error}") from error

    def add(self, row: dict[str, Any]) -> None:
        """Write a row of metrics with its ``step``."""
        append_rows(self.directory / "metrics.jsonl", [row])
        metrics = {name: value for name, value in row.items() if name != "step" and not isinstance(value, list)}
        self._call("log", metrics, step=row["step"])

    def add_sample(self, step: int, prompt: str, text: str) -> None:
        """Write the model's completion of a prompt; of the trackers, TensorBoard shows it."""
        append_rows(self.directory / "samples.jsonl", [{"step": step, "prompt": prompt, "text": text}])
        if "tensorboard" in self._trackers:
            self._call("log_text", prompt, text, step, only="tensorboard")

    def close(self) -> None:
        """End the run in all trackers."""
        self._call("finish")

    def _call(self, function: str, *args: Any, only: str | None = None, **kwargs: Any) -> None:
        for name in [only] if only else list(self._trackers):
            try:
                getattr(self._trackers[name], function)(*args, **kwargs)
            except Exception as error:  # the training is more important
                log.warning("%s failed and gets no more metrics: %s", name, error)
                del self._trackers[name]


class _TensorBoard:
    """TensorBoard with the functions of the other trackers."""

    def __init__(self, directory: Path, step: int) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(directory), purge_step=step + 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_text(self, prompt: str, text: str, step: int) -> None:
        self._writer.add_text(prompt, text, step)

    def finish(self) -> None:
        self._writer.close()


def log_step(row: dict[str, Any], total_steps: int, throughput: Throughput, metrics: dict[str, float]) -> None:
    """Log one line about a training step, with the objective's own ``metrics``."""
    step = row["step"]
    mfu = "–" if throughput.mfu is None else f"{100 * throughput.mfu:.0f} %"
    speed = f"{throughput.tokens_per_second:,.0f} tokens/s  MFU {mfu}  "
    log.info(
        "step %s/%s (%d %%)  loss %.3f  lr %.1e  grad norm %.2f  %s%.0f ms  %s%.1f min left",
        f"{step:,}",
        f"{total_steps:,}",
        100 * step // total_steps,
        row["smoothed_loss"],
        row["lr"],
        row["grad_norm"],
        "".join(f"{name.replace('_', ' ')} {value:.4g}  " for name, value in metrics.items()),
        1000 * throughput.seconds_per_step,
        speed if throughput.tokens_per_second else "",
        (total_steps - step) * throughput.total_seconds_per_step / 60,
    )
