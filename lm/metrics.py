"""Figures about models and runs: parameters, FLOPs, bits per byte, and the plot of a training run."""

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

from lm.model import ModelConfig


def parameter_count(config: ModelConfig) -> dict[str, int]:
    """Parameters by part and in ``total``: embedding, attention, feed_forward, norms, head (0 where it is tied)."""
    vocab, d, layers = config.vocab_size or 0, config.d_model, config.num_layers
    d_k = d // config.num_heads
    norms = {"pre": 2 * layers + 1, "post": 2 * layers, "none": 0}[config.norm] * d
    parts = {
        "embedding": vocab * d,
        "attention": layers * 2 * d * (d + config.kv_heads * d_k),
        "feed_forward": layers * (3 if config.feed_forward == "swiglu" else 2) * d * config.d_ff,
        "norms": norms + (2 * layers * d_k if config.qk_norm else 0),
        "head": 0 if config.tied_embeddings else vocab * d,
    }
    return {**parts, "total": sum(parts.values())}


def flops_per_token(config: ModelConfig, training: bool = True) -> int:
    """Floating-point operations a token of a full context, matrix products only.

    Forward: 2 a matrix parameter (the embedding is a look-up and costs none, the head does), and 2 · layers · d_model ·
    context for the scores and their weighted sum, the masked half taken off. Training costs three times that: forward,
    and backward for weights and inputs. Kaplan et al. 2020; CS336 assignment 1, section 3.6, where the mask stays in.
    """
    parts = parameter_count(config)
    matrices = parts["attention"] + parts["feed_forward"] + (config.vocab_size or 0) * config.d_model
    forward = 2 * matrices + 2 * config.num_layers * config.d_model * config.context_length
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
            except (ValueError, RecursionError):
                break
    return rows


def write_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a ``metrics.jsonl`` anew, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(metrics_line(row) for row in rows), encoding="utf-8")
    temporary.replace(path)


def metrics_line(row: dict[str, Any]) -> str:
    """A line of a ``metrics.jsonl``."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def plot_metrics(rows: list[dict[str, Any]], out: Path | BinaryIO) -> None:
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
    figure.savefig(out, dpi=150, format="png")
