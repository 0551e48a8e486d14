"""Pages of a training: its budget, its loss, the load of its experts, and samples of the model."""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages.charts import embed_figure, embed_image, new_figure, token_picture, token_texts
from tasks.pages.markdown import code, escape_markdown, table

if TYPE_CHECKING:
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt


def budget(out: "Attempt", **inputs: Any) -> Iterator[str]:
    """Show why the configuration was chosen, and the configuration as YAML to edit."""
    lines = (out.directory / "config.yaml").read_text(encoding="utf-8").splitlines()
    reasons = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    yield "\n".join(f"- {escape_markdown(reason)}" for reason in reasons)
    yield "\n".join(["```yaml", *lines[len(reasons) :], "```"])
    yield "To change it, save this as a file, edit it, and run with `--config FILE` instead of a budget."


def train(
    out: "Attempt", index: "Output", tokenizer: "Output", model: Any, config: Any, mix: Any = None, **inputs: Any
) -> Iterator[str]:
    """Show the loss, the size and cost of the model, samples over time, and the configuration."""
    from lm.model.flops import flops_per_token, parameter_count
    from lm.train.tracking import read_metrics

    yield embed_image((out.directory / "loss.png").read_bytes(), "image/png", "Loss and learning rate by step")
    result = out.figures
    if result["valid_loss"] is None:
        yield "There was no validation text."
    else:
        losses = [
            ("loss, nats per token", f"{result['valid_loss']:.4f}"),
            ("**bits per byte**", f"**{result['valid_bits_per_byte']:.4f}**"),
        ]
        yield table((f"whole validation text, last checkpoint, {code(result['last'])}", ""), losses)
    if mix:
        yield _sources_table(result, index.json("index.json"), mix, model, config)
    yield f"Samples, chat and export use the best checkpoint, {code(result['best'])}."
    model = replace(model, vocab_size=model.vocab_size or tokenizer.manifest["figures"]["vocab_size"])
    parameters, flops = parameter_count(model), flops_per_token(model)
    costs = [
        ("steps", result["steps"]),
        ("tokens seen", result["tokens"]),
        ("parameters", parameters.pop("total")),
        *((f"… {part.replace('_', ' ')}", number) for part, number in parameters.items()),
        ("FLOPs per token, forward and backward", flops),
        ("FLOPs of the training", f"{flops * result['tokens']:.3g}"),
    ]
    yield table(("size and cost", ""), costs)
    if model.moe is not None:
        yield from expert_loads(read_metrics(out.directory / "metrics.jsonl"), model.moe.num_dense_layers)
    rows = read_metrics(out.directory / "samples.jsonl")
    samples = [(sample["step"], code(sample["prompt"]), code(sample["text"])) for sample in rows]
    yield "### Samples over time\n\n" + table(("step", "prompt", "completion"), samples[:: len(samples) // 20 + 1])
    settings = [(name, code(json.dumps(value))) for part in (model, config) for name, value in asdict(part).items()]
    yield "### Configuration\n\n" + table(("field", "value"), settings)


def _sources_table(result: dict[str, Any], index: dict[str, Any], mix: Any, model: Any, config: Any) -> str:
    """Show what the training read of each source of the mixture, and the losses of their validation texts."""
    from lm.data.mixed_batches import MixedBatches, read_sources

    sources = read_sources(index, mix)
    batches = MixedBatches(
        sources, config.batch_size, model.context_length, config.data_order, config.seed, config.steps
    )
    rows = []
    for source, windows, count in zip(sources, batches.windows, batches.sequences(result["steps"]), strict=True):
        names = f"valid_loss/{source.name}", f"valid_bits_per_byte/{source.name}"
        losses = [f"{result[name]:.4f}" if result.get(name) is not None else "" for name in names]
        share = f"{100 * count / max(1, result['steps'] * config.batch_size):.2f} %"
        rows.append((source.name, share, count, f"{count / max(1, windows):.2f}", *losses))
    return "### Sources\n\n" + table(
        ("source", "share of the sequences", "sequences", "epochs", "valid loss", "bits per byte"), rows
    )


def unfinished(directory: Path) -> str:
    """Return the loss plot of a training that is still running; empty before its first metrics."""
    from lm.train.tracking import plot_metrics, read_metrics

    rows = read_metrics(directory / "metrics.jsonl")
    if not rows:
        return ""
    plot = io.BytesIO()
    plot_metrics(rows, plot)
    return embed_image(plot.getvalue(), "image/png", f"Loss and learning rate, up to step {rows[-1]['step']:,}")


def expert_loads(rows: list[dict[str, Any]], num_dense_layers: int) -> Iterator[str]:
    """Show the load of each expert over the logged steps, and the figures of the last one, from ``metrics.jsonl``.

    The first ``num_dense_layers`` blocks have no experts, and no row in the picture.
    """
    logged = [row for row in rows if row.get("expert_loads")]
    if not logged:
        return
    last = logged[-1]
    figures = [
        ("highest load, times the mean", f"{last['expert_load_max']:.2f}"),
        ("entropy of the loads, at most 1", f"{last['expert_load_entropy']:.3f}"),
        ("experts without a token", last["dead_experts"]),
        ("auxiliary loss, 1 if balanced", f"{last['aux_loss']:.3f}"),
        ("router z-loss", f"{last['z_loss']:.3f}"),
    ]
    if "dropped_choices" in last:
        figures.append(("choices dropped by the capacity", f"{100 * last['dropped_choices']:.1f} %"))
    yield "### Experts\n\n" + table((f"step {last['step']:,}", ""), figures)
    drawn = logged[:: len(logged) // 400 + 1]
    loads = np.array([row["expert_loads"] for row in drawn])  # (steps, blocks, experts)
    steps, blocks, experts = loads.shape
    title, size = "Load of each expert by step", (8, 1.2 + min(8.0, 0.16 * blocks * experts))
    figure, axes = new_figure(title, "step", "expert, by block", size=size)
    axes.grid(visible=False)
    picture = loads.reshape(steps, blocks * experts).T
    edges = [0, *(row["step"] for row in drawn)]  # a column ends at its step
    # The load is drawn up to twice the mean, so the scale is symmetrical around 1.
    mesh = axes.pcolormesh(edges, np.arange(blocks * experts + 1), picture, cmap="RdBu_r", vmin=0, vmax=2)
    axes.hlines(np.arange(1, blocks) * experts, 0, edges[-1], colors="black", linewidth=0.8)
    names = [f"block {num_dense_layers + 1 + index}" for index in range(blocks)]
    axes.set_yticks(np.arange(blocks) * experts + experts / 2, names)
    axes.invert_yaxis()
    figure.colorbar(mesh, label="load over the mean", extend="max")
    yield embed_figure(figure, title)


def sample(out: "Attempt", tokenizer: "Output", **inputs: Any) -> Iterator[str]:
    """Show the samples, and the tokens of the first."""
    from lm.tokenizer.tokenizer import Tokenizer

    samples = out.read_json("samples.json")
    yield "\n\n---\n\n".join(
        f"Prompt: {code(sample['prompt'])}\n\n{escape_markdown(sample['text'])}" for sample in samples
    )
    if samples:
        text = samples[0]["prompt"] + samples[0]["text"]
        tokens = token_texts(Tokenizer.load(tokenizer.directory("tokenizer")), text)
        yield "---\n\n### Tokens of the first sample\n\n" + token_picture(tokens[:300])
