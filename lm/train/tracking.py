"""Metrics of a training: log lines, ``metrics.jsonl``, ``samples.jsonl`` and experiment trackers."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from lm.common.errors import UserError, translate_write_errors
from lm.train.throughput import Throughput

log = logging.getLogger(__name__)

_LOGGED_METRICS = {
    "reward": "reward",
    "learned_reward": "learned reward",
    "accuracy": "accuracy",
    "margin": "margin",
    "kl": "KL",
    "response_tokens": "tokens",
    "entropy": "entropy",
    "value_loss": "value loss",
    "expert_load_max": "expert load",
}
"""Metrics of objectives in a step's log line, with their names there. ``metrics.jsonl`` has all."""
_MAX_LOGGED_METRICS = 3


class Tracker:
    """Writes metrics and samples to files in ``directory`` and to the ``trackers`` by name.

    Each row of metrics gets ``at``, the date and time, and ``seconds`` since the training started, without the time
    between an interruption and the resumption at ``step``. ``tensorboard`` writes to ``tensorboard/`` in the directory;
    rows of an interrupted run after ``step`` are hidden. ``wandb`` and ``trackio`` are modules with ``init``, ``log``
    and ``finish``. Raises UserError if a tracker is not installed or does not start. A tracker that fails later is
    removed with a warning.
    """

    def __init__(self, directory: Path, trackers: Sequence[str], config: dict[str, Any], step: int) -> None:
        self.directory = directory
        self._trackers: dict[str, Any] = {}
        for name in trackers:
            try:
                if name == "tensorboard":
                    self._trackers[name] = _TensorBoard(directory / name, step)
                elif name == "mlflow":
                    self._trackers[name] = _MLflow(directory.name, config)
                else:
                    module = import_module(name)
                    module.init(project="textmill", name=directory.name, config=config)
                    self._trackers[name] = module
            except ImportError as error:
                raise UserError(
                    f"execution.trackers names {name}, but it cannot be imported ({error}); install it "
                    f"(pip install {name}) or leave it out."
                ) from None
            except Exception as error:  # each tracker has its own, e.g. for a missing key
                raise UserError(f"execution.trackers names {name}, but it does not start: {error}") from error
        self._started = time.perf_counter() - _seconds_until(step, read_metrics(directory / "metrics.jsonl"))

    def add(self, row: dict[str, Any]) -> None:
        """Write a row of metrics with its ``step``."""
        row = {**row, "seconds": round(time.perf_counter() - self._started, 3)}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        append_rows(self.directory / "metrics.jsonl", [{**row, "at": at}])
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


class _MLflow:
    """A run of MLflow's experiment ``textmill`` with the functions of the other trackers. MLFLOW_TRACKING_URI says
    where it is stored."""

    def __init__(self, name: str, config: dict[str, dict[str, Any]]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it asks for another value of DO_NOT_TRACK than 1
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment("textmill")
        self._mlflow.start_run(run_name=name)
        fields = {f"{section}.{key}": value for section, values in config.items() for key, value in values.items()}
        self._mlflow.log_params(fields)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._mlflow.log_metrics(metrics, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


def log_step(row: dict[str, Any], total_steps: int, throughput: Throughput, metrics: dict[str, float]) -> None:
    """Log one line about a training step, with some of the objective's own ``metrics``.

    With the time of day before it, the line has at most 80 characters, and 100 with metrics.
    """
    step, shown = row["step"], [name for name in _LOGGED_METRICS if name in metrics][:_MAX_LOGGED_METRICS]
    figures = [f"step {step:,}/{total_steps:,}", f"loss {row['smoothed_loss']:.3f}"]
    figures += [f"{_LOGGED_METRICS[name]} {metrics[name]:.3g}" for name in shown]
    if (speed := throughput.tokens_per_second) and len(shown) < 2:
        figures.append(f"{speed / 1e6:.2f}M tokens/s" if speed >= 1e6 else f"{speed:,.0f} tokens/s")
        figures += [] if throughput.mfu is None else [f"MFU {100 * throughput.mfu:.0f} %"]
    seconds = (total_steps - step) * throughput.total_seconds_per_step
    units = ((seconds, "s"), (seconds / 60, "min"), (seconds / 3600, "h"))
    number, unit = next((pair for pair in units if pair[0] < 90), units[-1])
    figures.append(f"{number:.0f} {unit} left")
    log.info("%s", "  ".join(figures))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a ``metrics.jsonl`` up to the first damaged line, e.g. a line cut off by a crash."""
    return list(iterate_metrics(path))


def _seconds_until(step: int, rows: Sequence[dict[str, Any]]) -> float:
    """Return how long a training took up to ``step``, by its last row of metrics; 0 if no row says it.

    The steps between the row and the checkpoint are counted with the mean time of a step.
    """
    last = rows[-1] if rows else {}
    seconds = last.get("seconds")  # rows of earlier versions have none
    return seconds * step / last["step"] if isinstance(seconds, int | float) else 0.0


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of :func:`read_metrics`, one in memory at a time: a file of responses may have gigabytes."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    break
                yield row


def step_reporter(path: Path, progress: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that calls ``progress`` with the last step in a ``metrics.jsonl`` if the file has new rows.

    It reads only what was added since the last call, up to the last complete line.
    """
    end = 0  # of the lines that were read, in bytes

    def report() -> None:
        nonlocal end
        size = path.stat().st_size if path.exists() else 0
        if size < end:  # a resumed training drops the rows after its checkpoint
            end = 0
        if size == end:
            return
        with path.open("rb") as file:
            file.seek(end)
            lines = file.read().split(b"\n")[:-1]
        if not lines:
            return
        end += sum(len(line) + 1 for line in lines)
        try:
            step = json.loads(lines[-1])["step"]
        except (ValueError, RecursionError):  # a damaged line
            return
        progress(step)

    return report


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a ``metrics.jsonl``. Raises UserError if it cannot be written, e.g. on a full disk."""
    with translate_write_errors(path), path.open("a", encoding="utf-8") as file:
        file.writelines(map(format_row, rows))


def write_metrics(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a ``metrics.jsonl`` atomically. ``rows`` may be read from it meanwhile."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(map(format_row, rows))
    temporary.replace(path)


def format_row(row: dict[str, Any]) -> str:
    """Return the line of a ``metrics.jsonl`` for ``row``."""
    return json.dumps(replace_non_finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def replace_non_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity and NaN, which JSON does not have, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write ``training.json``, and plot the metrics. Raises StorageError if a file cannot be written."""
    text = json.dumps(replace_non_finite(result), indent=1, allow_nan=False)
    with translate_write_errors(out):
        plot_metrics(read_metrics(out / "metrics.jsonl"), out / "loss.png")
        (out / "training.json").write_text(text, encoding="utf-8")


def plot_metrics(rows: list[dict[str, Any]], out: Path | BinaryIO) -> None:
    """Plot training loss, validation loss and learning rate over the steps as a PNG."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    loss_axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    lr_axes = loss_axes.twinx()
    lr_axes.set_ylabel("learning rate")
    for axes, key, label, style in (
        (loss_axes, "loss", "training", {"markersize": 3, "linewidth": 1}),
        (loss_axes, "valid_loss", "validation", {"marker": "o", "markersize": 3, "linewidth": 1}),
        (lr_axes, "lr", "learning rate", {"color": "0.7", "linewidth": 1, "linestyle": "--"}),
    ):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if loss_axes.lines or lr_axes.lines:
        figure.legend(loc="outside upper right", ncols=3)
    loss_axes.grid(alpha=0.3)
    figure.savefig(out, dpi=150, format="png")
