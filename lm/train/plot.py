"""The plot of a training."""

from pathlib import Path
from typing import Any, BinaryIO


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
