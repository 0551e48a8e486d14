"""Curves of runs side by side: the losses of their trainings over steps, tokens and time."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.common.errors import UserError, translate_write_errors
from tasks.pages.charts import label_legend, new_figure
from tasks.runs.models import RESULT_STAGES
from tasks.runs.run_record import absolute_root, read_run, require_run
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.store import Store


class Quantity(NamedTuple):
    """What the curves of a training show."""

    label: str
    train: str
    """Name of its metric on training data."""
    valid: str
    """Name of its metric on validation data."""


_LOSS = Quantity("loss, nats per token", "smoothed_loss", "valid_loss")
_QUANTITIES = {
    "train": _LOSS,
    "sft": _LOSS,
    "distill": Quantity("divergence from the teacher, nats per token", "divergence", "valid_divergence"),
    "preference": Quantity("loss, nats per pair", "smoothed_loss", "valid_loss"),
    "reinforce": Quantity("reward", "reward", "valid_reward"),
    "ppo": Quantity("learned reward", "learned_reward", "valid_learned_reward"),
}
"""By the stage of the training."""
_TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
_LINE_STYLES = ("-", "--", ":")  # for more runs than there are colours


@dataclass(frozen=True)
class Training:
    """The training of a run."""

    run: str
    output: Output
    tokenizer: frozenset[str]
    """SHA-256 of the tokenizer's files."""
    data: str
    """Key of the texts or examples; empty if the run has none of its own."""
    rows: list[dict[str, Any]]
    """The rows of ``metrics.jsonl``."""

    @property
    def label(self) -> str:
        """The name of the run, with at most 26 characters."""
        return self.run if len(self.run) <= 26 else f"{self.run[:15]}…{self.run[-10:]}"

    def figure(self, name: str) -> float | None:
        """Return a figure of the finished training; None if there is none."""
        return _number(self.output.manifest["figures"], name)

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric; None if no row has it."""
        return next((value for row in reversed(self.rows) if (value := _number(row, metric)) is not None), None)

    @property
    def bits_per_nat(self) -> float | None:
        """Factor from nats per token to bits per byte; None without validation text."""
        loss, bits = self.figure("valid_loss"), self.figure("valid_bits_per_byte")
        return bits / loss if loss and bits else None


@dataclass(frozen=True)
class RunComparison:
    """The trainings of several runs, and the files with their curves."""

    quantity: Quantity
    trainings: list[Training]
    files: list[Path]
    notes: list[str]
    """What to know before the curves are compared."""


def compare_runs(names: Sequence[str], root: str, out: str = "") -> RunComparison:
    """Draw the curves of the last training that all runs have. Write ``curves.png`` and ``curves.svg`` to the directory
    ``out``, by default ``comparison``.

    Losses are in nats per token, or in bits per byte if the tokenizers differ. Raises UserError for an unknown run, a
    run that is named twice, a run without a training, and runs whose losses do not compare.
    """
    store = Store(absolute_root(root))
    runs = [require_run(store, name) for name in names]
    if repeated := next((name for name, run in zip(names, runs, strict=True) if runs.count(run) > 1), None):
        raise UserError(f"The run {repeated} is named twice; name each run once.")
    # Curves and messages name a run as the user does.
    trainings = _open_trainings(store, {name: _read_stages(store, run) for name, run in zip(names, runs, strict=True)})
    quantity = _QUANTITIES[trainings[0].output.ref.stage]
    label, notes = quantity.label, list[str]()
    scales = dict.fromkeys(names, 1.0)
    if quantity == _LOSS and len({training.tokenizer for training in trainings}) > 1:
        label = "loss, bits per byte"
        scales = {training.run: _bits_per_nat(training) for training in trainings}
        notes.append("The tokenizers differ, so losses per token do not compare: the curves show bits per byte.")
    if len({training.data for training in trainings}) > 1:
        notes.append("The runs have different data: a lower loss may come from easier text.")
    by_output: dict[Ref, str] = {}
    for training in trainings:
        if (other := by_output.setdefault(training.output.ref, training.run)) != training.run:
            notes.append(f"{other} and {training.run} have the same training, so their curves are one.")
    if untimed := [training.run for training in trainings if training.last("seconds") is None]:
        notes.append(f"Trained by an earlier version, which logged no times: {', '.join(untimed)}.")
    figure = _draw(quantity._replace(label=label), trainings, scales)
    directory = Path(out or "comparison")
    files = [directory / "curves.png", directory / "curves.svg"]
    with translate_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, dpi=150)
    return RunComparison(quantity, trainings, files, notes)


def _read_stages(store: Store, name: str) -> dict[str, str]:
    """Return the key of each finished stage of a run."""
    if not (record := read_run(store, name)):
        raise UserError(f"The run record {store.url('runs', name)}.json is damaged; run the pipeline again.")
    return {stage: result["key"] for stage, result in record["stages"].items()}


def _open_trainings(store: Store, runs: dict[str, dict[str, str]]) -> list[Training]:
    """Open the last training that all runs have."""
    trained: dict[str, dict[str, str]] = {}  # for each run, the stage of the tokenizer by the stage of the training
    for name, keys in runs.items():
        trained[name] = {stage: tokenizer for stage, tokenizer in RESULT_STAGES if {stage, tokenizer} <= keys.keys()}
        if not trained[name]:
            raise UserError(
                f"The run {name} has no finished training; its stages are: {', '.join(keys) or 'none'}. Name a run "
                "that trained a model."
            )
    stage = next((stage for stage, _ in RESULT_STAGES if all(stage in found for found in trained.values())), None)
    if not stage:
        last = ", ".join(f"{name} ends with {next(iter(found))}" for name, found in trained.items())
        raise UserError(f"The runs have no training stage in common, so their losses do not compare: {last}.")
    return [_open_training(store, name, keys, stage, trained[name][stage]) for name, keys in runs.items()]


def _open_training(store: Store, name: str, keys: dict[str, str], stage: str, tokenizer_stage: str) -> Training:
    from lm.train.tracking import read_metrics

    output, tokenizer = (read_output(store, Ref(part, keys[part])) for part in (stage, tokenizer_stage))
    files = tokenizer.manifest["files"]
    checksums = frozenset(file["sha256"] for file in files if file["path"].startswith("tokenizer/"))
    data = keys.get("ingest" if stage == "train" else "dialogs", "")
    rows = [row for row in read_metrics(output.path("metrics.jsonl")) if isinstance(row, dict)]
    return Training(name, output, checksums, data, rows)


def _bits_per_nat(training: Training) -> float:
    """Return the factor to bits per byte. Raises UserError if the training has none."""
    if factor := training.bits_per_nat:
        return factor
    raise UserError(
        f"The tokenizers differ, so losses per token do not compare, and {training.run} has no bits per byte: "
        "these need a pretraining with validation text. Compare runs with one tokenizer."
    )


def _number(values: dict[str, Any], name: str) -> float | None:
    """Return a finite number; None if there is none, as for a loss that is not finite."""
    value = values.get(name)
    return value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _draw(quantity: Quantity, trainings: Sequence[Training], scales: dict[str, float]) -> Any:
    """Return a figure with a panel each for steps, tokens and time. Values are multiplied by the scale of their run."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    longest = max(training.last("seconds") or 0 for training in trainings)
    unit, unit_seconds = next((unit for unit in _TIME_UNITS if longest > 2 * unit[1]), _TIME_UNITS[-1])
    figure, *panels = new_figure("", "steps", quantity.label, size=(13, 4.5), widths=(1, 1, 1))
    for axes, label in zip(panels[1:], ("tokens", unit), strict=True):
        axes.set_xlabel(label)
        axes.sharey(panels[0])
        axes.tick_params(labelleft=False)
    for axes in panels[:2]:
        axes.xaxis.set_major_formatter(EngFormatter())
    looks: dict[str, dict[str, Any]] = {
        quantity.train: {"alpha": 0.4},
        quantity.valid: {"marker": "o", "markersize": 3},
    }
    styles: list[dict[str, Any]] = [
        {"color": f"C{number % 10}", "linestyle": _LINE_STYLES[number // 10 % len(_LINE_STYLES)]}
        for number in range(len(trainings))
    ]
    for training, style in zip(trainings, styles, strict=True):
        # The number of tokens may differ between steps; then it is not known where a row is.
        tokens_per_step = (training.figure("tokens") or math.nan) / (training.figure("steps") or math.nan)
        for metric, look in looks.items():
            rows = [[_number(row, name) for name in ("step", metric, "seconds")] for row in training.rows]
            columns = np.array([row for row in rows if None not in row[:2]], float).reshape(-1, 3)  # NaN is not drawn
            steps, values, seconds = columns.T
            for axes, places in zip(panels, (steps, steps * tokens_per_step, seconds / unit_seconds), strict=True):
                axes.plot(places, values * scales[training.run], **style, **look)
    names = ["training", "validation", *(training.label for training in trainings)]
    handles = [Line2D([], [], **style) for style in ({"color": "0.4", **look} for look in looks.values())]
    handles += [Line2D([], [], **style) for style in styles]
    label_legend(figure.legend(handles, names, loc="outside upper center", ncols=4), names)
    return figure
