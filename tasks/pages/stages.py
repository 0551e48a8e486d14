"""The Markdown page of each stage: what came out, in words, tables and pictures.

A page is written beside the files of its stage and shown as a Prefect artifact. It is in no digest. Pictures are data
URIs, so a page is a single file.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages import experts
from tasks.pages.markdown import code, escape_markdown, table
from tasks.pages.plots import (
    QUARTER_OCTAVES,
    embed_figure,
    embed_image,
    histogram,
    new_figure,
    token_picture,
    token_texts,
)

if TYPE_CHECKING:
    from lm.tokenizer.config import TokenizerConfig
    from tasks.runtime.context import Attempt
    from tasks.runtime.output import Output

_EXAMPLE_TEXT = (
    "Once upon a time there wasn't any tokenizer: in 1994 «byte pair encoding» only compressed files. "
    "Naïve café, 東京 and 🙂 cost more tokens than plain words do."
)
_MAX_SOURCES = 20
_MAX_SHARDS_READ = 500
_MIN_COUNTS = (1, 2, 3, 5, 10)


def ingest(out: "Attempt", train: "list[Output]", valid: "list[Output]", **inputs: Any) -> Iterator[str]:
    """Show documents, bytes and sources, and the lengths of the documents."""
    statistics = json.loads((out.directory / "text_groups.json").read_text(encoding="utf-8"))["statistics"]
    columns = ("documents", "bytes", "replaced", "separators_removed")
    rows = [(split, *(counts[name] for name in columns)) for split, counts in statistics.items()]
    yield table(("text", "documents", "bytes", "invalid sequences replaced", "separators removed"), rows)
    lengths = np.sum([counts["lengths"] for counts in statistics.values()], axis=0)
    yield histogram("Length of the documents", "characters", lengths, QUARTER_OCTAVES, "documents")
    sources = [source for group in (*train, *valid) for source in group.manifest["sources"]]
    shown = [(code(source["url"]), source["bytes"], code(source["sha256"][:12])) for source in sources[:_MAX_SOURCES]]
    yield table(("source", "bytes as stored", "sha256"), shown)
    if len(sources) > _MAX_SOURCES:
        yield f"… and {len(sources) - _MAX_SOURCES:,} more sources."


def budget(out: "Attempt", **inputs: Any) -> Iterator[str]:
    """Show why the configuration was chosen, and the configuration as YAML to edit."""
    lines = (out.directory / "config.yaml").read_text(encoding="utf-8").splitlines()
    reasons = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    yield "\n".join(f"- {escape_markdown(reason)}" for reason in reasons)
    yield "\n".join(["```yaml", *lines[len(reasons) :], "```"])
    yield "To change it, save this as a file, edit it, and run with `--config FILE` instead of a budget."


def chunk(out: "Attempt", train: "list[Output]", valid: "list[Output]") -> Iterator[str]:
    """Show the number and the sizes of the chunks."""
    rows = []
    for split, parts in (("train", train), ("valid", valid)):
        figures = [part.manifest["figures"] for part in parts if part.manifest["figures"]["chunks"]]
        chunks, size = (sum(part[name] for part in figures) for name in ("chunks", "bytes"))
        smallest = min((part["smallest"] for part in figures), default=0)
        largest = max((part["largest"] for part in figures), default=0)
        rows.append((split, chunks, size, smallest, largest))
    yield table(("text", "chunks", "bytes", "smallest", "largest"), rows)
    sizes = np.sum([part.manifest["figures"]["sizes"] for part in (*train, *valid)], axis=0)
    yield histogram("Size of the chunks", "bytes", sizes, QUARTER_OCTAVES, "chunks")


def count(out: "Attempt", parts: "list[Output]") -> Iterator[str]:
    """Show the most common and the longest pretokens, the counts by rank, and the memory that merge will need."""
    from lm.tokenizer.bpe import training_memory_bytes
    from lm.tokenizer.counts_summary import summarize_counts

    summary = summarize_counts(out.directory / "counts.parquet", _MIN_COUNTS)
    total = summary.total
    yield f"**{total:,}** pretokens, **{summary.unique:,}** different ones, from {len(parts):,} groups of chunks."
    figure, axes = new_figure("Zipf's law: the count of the pretoken of each rank", "rank", "count")
    if summary.unique:
        axes.loglog(*summary.counts_by_rank)
    yield embed_figure(figure, "Counts by rank")
    rows = [(code(pretoken), count, f"{100 * count / total:.2f} %") for pretoken, count in summary.common]
    yield "### Most common\n\n" + table(("pretoken", "count", "share"), rows)
    longest = [(code(pretoken[:80]), len(pretoken), count) for pretoken, count in summary.longest]
    yield "### Longest\n\n" + table(("pretoken", "bytes", "count"), longest)
    costs = [
        (
            min_count,
            kept.unique,
            kept.bytes,
            f"{100 * kept.total / max(1, total):.2f} %",
            training_memory_bytes(kept.unique, kept.bytes) / 1e9,
        )
        for min_count, kept in summary.kept.items()
    ]
    header = ("tokenizer.min_count", "different pretokens", "bytes", "share of all occurrences", "memory for merge, GB")
    yield "### What rare pretokens cost\n\n" + table(header, costs)


def merge(out: "Attempt", counts: "Output", config: "TokenizerConfig") -> Iterator[str]:
    """Show the tokenizer: its size, a sentence in tokens, and the lengths of the tokens."""
    from lm.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(out.directory / "tokenizer")
    special_tokens, pattern = ", ".join(map(code, tokenizer.special_tokens)), tokenizer.pattern
    yield (
        f"**{tokenizer.size:,}** token ids: 256 bytes, {len(tokenizer.merges):,} merges, special tokens "
        f"{special_tokens}. Pattern: {code(pattern if isinstance(pattern, str) else ' '.join(pattern))}"
    )
    if rare := out.figures.get("left_out"):
        yield (
            f"{rare['unique']:,} rare pretokens, {100 * rare['share']:.2f} % of all occurrences, were left out "
            f"(`tokenizer.min_count` is {config.min_count})."
        )
    tokens = token_texts(tokenizer, _EXAMPLE_TEXT)
    yield f"### A sentence in {len(tokens)} tokens\n\n" + token_picture(tokens)
    lengths = {
        token_id: len(tokenizer.vocab[token_id]) for token_id in tokenizer.vocab.keys() - tokenizer.special_ids.values()
    }
    histogram_of_lengths = np.bincount(list(lengths.values()))
    edges = np.arange(len(histogram_of_lengths) + 1) - 0.5
    yield histogram("Length of the tokens", "bytes", histogram_of_lengths, edges, "token ids")
    longest = sorted(lengths, key=lambda token_id: (-lengths[token_id], token_id))[:20]
    rows = [(str(token_id), code(tokenizer.vocab[token_id]), lengths[token_id]) for token_id in longest]
    yield "### Longest tokens\n\n" + table(("id", "token", "bytes"), rows)


def encode(out: "Attempt", train: "list[Output]", valid: "list[Output]", **inputs: Any) -> Iterator[str]:
    """Show tokens, compression and throughput, and the lengths of the documents."""
    columns = ("documents", "bytes", "tokens", "bytes_per_token")
    rows = [
        (split, len(parts), *(out.figures[split][name] for name in columns))
        for split, parts in (("train", train), ("valid", valid))
    ]
    yield table(("text", "shards", "documents", "bytes", "tokens", "bytes per token"), rows)
    if special_texts := sum(part.manifest["figures"].get("special_texts", 0) for part in (*train, *valid)):
        yield (
            f"**{special_texts:,}** texts of special tokens inside documents were encoded as ordinary text "
            "(`data.special_tokens_in_document` is text)."
        )
    yield _throughput([part.manifest for part in (*train, *valid)])
    shards = [*train, *valid]
    shown = shards[:: -(-len(shards) // _MAX_SHARDS_READ)]
    lengths = np.zeros(len(QUARTER_OCTAVES) - 1, int)
    for path in out.run.store.map(lambda part: part.path("documents.npy"), shown):
        lengths += np.histogram(np.diff(np.load(path), prepend=0), QUARTER_OCTAVES)[0]
    title = "Length of the documents" + (f" of {len(shown)} shards" if len(shown) < len(shards) else "")
    yield histogram(title, "tokens", lengths, QUARTER_OCTAVES, "documents")


def _throughput(manifests: list[dict[str, Any]]) -> str:
    """Return the throughput of the run that made the newest shard."""
    run = max((manifest["made"] for manifest in manifests), key=lambda made: made["started"])["run"]
    encoded = [manifest for manifest in manifests if manifest["made"]["run"] == run]
    megabytes = sum(manifest["figures"]["bytes"] for manifest in encoded) / 1e6
    made = [manifest["made"] for manifest in encoded]
    seconds = max(part["started"] + part["seconds"] for part in made) - min(part["started"] for part in made)
    cpu_seconds = sum(part["cpu_seconds"] for part in made)
    return (
        f"Run `{run}` encoded {megabytes:,.1f} MB ({len(encoded)} of {len(manifests)} shards) at "
        f"**{megabytes / max(1e-9, seconds):.2f} MB/s**, or {megabytes / max(1e-9, cpu_seconds):.2f} MB per CPU-second."
    )


def train(out: "Attempt", tokenizer: "Output", model: Any, config: Any, **inputs: Any) -> Iterator[str]:
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
        yield from experts.expert_loads(read_metrics(out.directory / "metrics.jsonl"), model.moe.num_dense_layers)
    samples = [
        (sample["step"], code(sample["prompt"]), code(sample["text"]))
        for sample in read_metrics(out.directory / "samples.jsonl")
    ]
    yield "### Samples over time\n\n" + table(("step", "prompt", "completion"), samples[:: len(samples) // 20 + 1])
    settings = [(name, code(json.dumps(value))) for part in (model, config) for name, value in asdict(part).items()]
    yield "### Configuration\n\n" + table(("field", "value"), settings)


def unfinished_training(directory: Path) -> str:
    """Return the loss plot of a training that is still running; empty before its first metrics."""
    from lm.train.tracking import plot_metrics, read_metrics

    rows = read_metrics(directory / "metrics.jsonl")
    if not rows:
        return ""
    plot = io.BytesIO()
    plot_metrics(rows, plot)
    return embed_image(plot.getvalue(), "image/png", f"Loss and learning rate, up to step {rows[-1]['step']:,}")


def sample(out: "Attempt", tokenizer: "Output", **inputs: Any) -> Iterator[str]:
    """Show the samples, and the tokens of the first."""
    from lm.tokenizer.tokenizer import Tokenizer

    samples = json.loads((out.directory / "samples.json").read_text(encoding="utf-8"))
    yield "\n\n---\n\n".join(
        f"Prompt: {code(sample['prompt'])}\n\n{escape_markdown(sample['text'])}" for sample in samples
    )
    if samples:
        text = samples[0]["prompt"] + samples[0]["text"]
        tokens = token_texts(Tokenizer.load(tokenizer.directory("tokenizer")), text)
        yield "---\n\n### Tokens of the first sample\n\n" + token_picture(tokens[:300])
