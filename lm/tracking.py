"""Where the figures of a training run go: its log, ``metrics.jsonl`` and ``samples.jsonl``, and trackers by name."""

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.metrics import metrics_line

log = logging.getLogger(__name__)


class Tracker:
    """Writes rows of figures, each of a ``step``, to a run's directory and to the trackers named.

    ``tensorboard`` writes its files to ``tensorboard/`` in the directory, where what an interrupted run wrote past
    ``step`` is hidden. ``wandb`` and ``trackio`` are modules with ``init``, ``log`` and ``finish``. Raises UserError
    for one that is not installed or does not start; one that fails later is warned of and left alone.
    """

    def __init__(self, directory: Path, trackers: Sequence[str], config: dict[str, Any], step: int) -> None:
        self.directory = directory
        self._board: Any = None
        self._modules: list[Any] = []
        for name in trackers:
            try:
                if name == "tensorboard":
                    writer = import_module("torch.utils.tensorboard").SummaryWriter
                    self._board = writer(str(directory / name), purge_step=step + 1)
                else:
                    module = import_module(name)
                    module.init(project="textmill", name=directory.name, config=config)
                    self._modules.append(module)
            except ImportError as error:
                raise UserError(
                    f"execution.trackers names {name}, which cannot be imported ({error}); install it "
                    f"(pip install {name}) or leave it out."
                ) from None
            except Exception as error:  # their own kinds, such as for a missing key
                raise UserError(f"execution.trackers names {name}, which does not start: {error}") from error

    def add(self, row: dict[str, Any]) -> None:
        """Write a row of figures."""
        self._append("metrics.jsonl", row)
        figures = {name: value for name, value in row.items() if name != "step"}
        self._tell("log", figures, step=row["step"])
        for name, value in figures.items() if self._board else ():
            self._board.add_scalar(name, value, row["step"])

    def add_sample(self, step: int, prompt: str, text: str) -> None:
        """Write the text that the model makes of a prompt."""
        self._append("samples.jsonl", {"step": step, "prompt": prompt, "text": text})
        if self._board:
            self._board.add_text(prompt, text, step)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        path = self.directory / name
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(metrics_line(row))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}. The training goes on once it can.") from error

    def close(self) -> None:
        """Tell the trackers that the run is over."""
        self._tell("finish")
        if self._board:
            self._board.close()

    def _tell(self, what: str, *arguments: Any, **options: Any) -> None:
        for module in list(self._modules):
            try:
                getattr(module, what)(*arguments, **options)
            except Exception as error:  # the training is worth more
                log.warning("%s fails and is told no more: %s", module.__name__, error)
                self._modules.remove(module)
