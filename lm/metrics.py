"""Figures about models and runs: parameters, FLOPs, bits per byte, and the plot of a training run."""

import json
import math
from pathlib import Path
from typing import Any

from lm.model import ModelConfig


def parameter_count(config: ModelConfig) -> dict[str, int]:
    """Parameters by part and in ``total``: embedding, attention, feed_forward, norms, head."""
    vocab, d, layers = config.vocab_size or 0, config.d_model, config.num_layers
    parts = {
        "embedding": vocab * d,
        "attention": layers * 4 * d * d,
        "feed_forward": layers * 3 * d * config.d_ff,
        "norms": (2 * layers + 1) * d,
        "head": vocab * d,
    }
    return {**parts, "total": sum(parts.values())}


def flops_per_token(config: ModelConfig, training: bool = True) -> int:
    """Floating-point operations a token of a full context, matrix products only.

    Forward: 2 a matrix parameter (the embedding is a look-up and costs none), and 4 · layers · d_model · context for
    the scores and their weighted sum. Training costs three times that: forward, and backward for weights and inputs.
    CS336 assignment 1, section 3.6; Kaplan et al. 2020. The causal mask is not taken off.
    """
    parts = parameter_count(config)
    matrices = parts["attention"] + parts["feed_forward"] + parts["head"]
    forward = 2 * matrices + 4 * config.num_layers * config.d_model * config.context_length
    return (3 if training else 1) * forward


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats a token as bits a byte of text, which compares across tokenizers."""
    return loss / math.log(2) / bytes_per_token


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; a last line cut off by a crash is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def plot_metrics(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw training loss, validation loss and learning rate over the steps into a PNG."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a token)")
    for key, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
    rates = axes.twinx()
    rates.set_ylabel("learning rate")
    points = [(row["step"], row["lr"]) for row in rows if "lr" in row]
    if points:
        rates.plot(*zip(*points, strict=True), label="learning rate", color="0.7", linewidth=1, linestyle="--")
    if axes.lines or rates.lines:
        figure.legend(loc="outside upper right", ncols=3)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
