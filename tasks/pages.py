"""One Markdown page a stage, for a person: what came out, in words, tables and pictures.

A page is written beside the files of its stage and shown as an artifact of each run that has the stage. It decides
nothing, so it is in no digest. Pictures are data URIs: a page is one file.
"""

import base64
import html
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.metrics import flops_per_token, parameter_count, plot_metrics, read_metrics
from lm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tasks.output import Output
    from tasks.stage import Draft

_SENTENCE = (
    "Once upon a time there wasn't any tokenizer: in 1994 «byte pair encoding» only compressed files. "
    "Naïve café, 東京 and 🙂 cost more tokens than plain words do."
)
_QUARTER_OCTAVES = 2 ** (np.arange(257) / 4)
_COLOURS = ("#cfe8ff", "#ffe3c2", "#d8f5d0", "#f5d6ee", "#fff3b0")


def ingest(out: "Draft", **inputs: Any) -> Iterator[str]:
    """Documents, bytes, where they came from, and how long the documents are."""
    found = json.loads((out.directory / "texts.json").read_text(encoding="utf-8"))["statistics"]
    rows = [
        (split, tally["documents"], tally["bytes"], tally["replaced"], tally["separators_removed"])
        for split, tally in found.items()
    ]
    yield table(("text", "documents", "bytes", "invalid sequences replaced", "separators removed"), rows)
    lengths = np.sum([tally["lengths"] for tally in found.values()], axis=0)
    yield _histogram("Length of the documents", "characters", lengths, _QUARTER_OCTAVES, "documents")
    sources = [(code(source.url), source.bytes, code(source.sha256[:12])) for source in out.sources]
    yield table(("source", "bytes as stored", "sha256"), sources[:20])
    if len(sources) > 20:
        yield f"… and {len(sources) - 20:,} more sources."


def chunk(out: "Draft", **inputs: Any) -> Iterator[str]:
    """How many chunks there are and how large."""
    chunks = json.loads((out.directory / "chunks.json").read_text(encoding="utf-8"))
    sizes = {
        split: [sum(part["end"] - part["start"] for part in ranges) for ranges in found]
        for split, found in chunks.items()
    }
    rows = [
        (split, len(found), sum(found), min(found, default=0), max(found, default=0)) for split, found in sizes.items()
    ]
    yield table(("text", "chunks", "bytes", "smallest", "largest"), rows)
    counts, edges = np.histogram([size / 1e6 for found in sizes.values() for size in found], bins=20)
    yield _histogram("Size of the chunks", "MB", counts, edges, "chunks")


def count(out: "Draft", parts: "list[Output]") -> Iterator[str]:
    """The commonest and the longest pretokens, and how counts fall with rank."""
    order = [("count", "descending"), ("pretoken", "ascending")]
    found = pq.read_table(out.directory / "counts.parquet").sort_by(order)
    counts = found["count"].to_numpy()
    total = int(counts.sum())
    yield f"**{total:,}** pretokens, **{len(counts):,}** different ones, from {len(parts):,} chunks."
    figure, axes = _figure("Zipf's law: how often the pretoken of each rank occurs", "rank", "count")
    ranks = np.unique(np.geomspace(1, max(1, len(counts)), 400).astype(int))
    if len(counts):
        axes.loglog(ranks, counts[ranks - 1])
    yield _image(figure, "Counts by rank")
    rows = [
        (code(row["pretoken"]), row["count"], f"{100 * row['count'] / total:.2f} %") for row in found[:20].to_pylist()
    ]
    yield "### Commonest\n\n" + table(("pretoken", "count", "share"), rows)
    lengths = pc.binary_length(found["pretoken"])
    longest = pc.select_k_unstable(lengths, k=min(10, len(found)), sort_keys=[("not needed", "descending")])
    rows = [(code(row["pretoken"][:80]), len(row["pretoken"]), row["count"]) for row in found.take(longest).to_pylist()]
    yield "### Longest\n\n" + table(("pretoken", "bytes", "count"), rows)


def merge(out: "Draft", **inputs: Any) -> Iterator[str]:
    """The tokenizer's card."""
    tokenizer = Tokenizer.load(out.directory / "tokenizer")
    specials = ", ".join(map(code, tokenizer.special_tokens))
    yield (
        f"**{tokenizer.size:,}** token ids: 256 bytes, {len(tokenizer.merges):,} merges, special tokens {specials}. "
        f"Pattern: {code(tokenizer.pattern)}"
    )
    segments = _segments(tokenizer, _SENTENCE)
    yield f"### A sentence in {len(segments)} tokens\n\n" + _segmentation(segments)
    learned = tokenizer.vocab.keys() - tokenizer.special_ids.values()
    lengths = np.bincount([len(tokenizer.vocab[token_id]) for token_id in learned])
    yield _histogram("Length of the tokens", "bytes", lengths, np.arange(len(lengths) + 1) - 0.5, "token ids")
    longest = sorted(learned, key=lambda token_id: (-len(tokenizer.vocab[token_id]), token_id))[:20]
    rows = [(str(key), code(tokenizer.vocab[key]), len(tokenizer.vocab[key])) for key in longest]
    yield "### Longest tokens\n\n" + table(("id", "token", "bytes"), rows)


def encode(out: "Draft", train: "list[Output]", valid: "list[Output]", **inputs: Any) -> Iterator[str]:
    """Tokens, compression, speed, and how long the documents are."""
    rows = [
        (split, len(parts), *(out.figures[split][name] for name in ("documents", "bytes", "tokens", "bytes_per_token")))
        for split, parts in (("train", train), ("valid", valid))
    ]
    yield table(("text", "shards", "documents", "bytes", "tokens", "bytes a token"), rows)
    yield _speed([part.manifest for part in (*train, *valid)])
    lengths = np.zeros(len(_QUARTER_OCTAVES) - 1, int)
    for part in (*train, *valid):
        tokens = np.diff(np.load(part.path("documents.npy")), prepend=0)
        lengths += np.histogram(tokens, _QUARTER_OCTAVES)[0]
    yield _histogram("Length of the documents", "tokens", lengths, _QUARTER_OCTAVES, "documents")


def _speed(manifests: list[dict[str, Any]]) -> str:
    """Throughput of the run that made the most recent of the shards."""
    latest = max((manifest["made"] for manifest in manifests), key=lambda made: made["started"])["run"]
    encoded = [manifest for manifest in manifests if manifest["made"]["run"] == latest]
    size = sum(manifest["figures"]["bytes"] for manifest in encoded) / 1e6
    made = [manifest["made"] for manifest in encoded]
    seconds = max(part["started"] + part["seconds"] for part in made) - min(part["started"] for part in made)
    cpu_seconds = sum(part["cpu_seconds"] for part in made)
    return (
        f"Run `{latest}` encoded {size:,.1f} MB ({len(encoded)} of {len(manifests)} shards) at "
        f"**{size / max(1e-9, seconds):.2f} MB/s**, {size / max(1e-9, cpu_seconds):.2f} MB a second of one core."
    )


def train(out: "Draft", tokenizer: "Output", model: Any, config: Any, **inputs: Any) -> Iterator[str]:
    """Loss plot, result, size and cost of the model, samples over time, configuration."""
    yield _picture((out.directory / "loss.png").read_bytes(), "image/png", "Loss and learning rate over the steps")
    result = out.figures
    if result["valid_loss"] is None:
        yield "There was no validation text."
    else:
        losses = [
            ("loss, nats a token", f"{result['valid_loss']:.4f}"),
            ("**bits per byte**", f"**{result['valid_bits_per_byte']:.4f}**"),
        ]
        yield table(("the whole validation text", ""), losses)
    yield f"Best checkpoint: {code(result['best'])}; the last: {code(result['last'])}."
    shape = replace(model, vocab_size=model.vocab_size or tokenizer.manifest["figures"]["vocab_size"])
    parameters, flops = parameter_count(shape), flops_per_token(shape)
    costs = [
        ("steps", result["steps"]),
        ("tokens seen", result["tokens"]),
        ("parameters", parameters.pop("total")),
        *((f"… {part.replace('_', ' ')}", number) for part, number in parameters.items()),
        ("FLOPs a token, forward and backward", flops),
        ("FLOPs of the training", f"{flops * result['tokens']:.3g}"),
    ]
    yield table(("size and cost", ""), costs)
    samples = [
        (sample["step"], code(sample["prompt"]), code(sample["text"]))
        for sample in read_metrics(out.directory / "samples.jsonl")
    ]
    yield "### Samples over time\n\n" + table(("step", "prompt", "goes on"), samples[:: len(samples) // 20 + 1])
    settings = [(name, code(json.dumps(value))) for part in (shape, config) for name, value in asdict(part).items()]
    yield "### Configuration\n\n" + table(("field", "value"), settings)


def training_so_far(directory: Path) -> str:
    """The loss plot of a training that runs in ``directory``; empty before its first figures."""
    rows = read_metrics(directory / "metrics.jsonl")
    if not rows:
        return ""
    plot = io.BytesIO()
    plot_metrics(rows, plot)
    return _picture(plot.getvalue(), "image/png", f"Loss and learning rate, up to step {rows[-1]['step']:,}")


def sample(out: "Draft", tokenizer: "Output", **inputs: Any) -> Iterator[str]:
    """The samples, and the first of them token by token."""
    samples = json.loads((out.directory / "samples.json").read_text(encoding="utf-8"))
    yield "\n\n---\n\n".join(f"{code(sample['prompt'])} goes on:\n\n{_plain(sample['text'])}" for sample in samples)
    if samples:
        text = samples[0]["prompt"] + samples[0]["text"]
        segments = _segments(Tokenizer.load(tokenizer.directory("tokenizer")), text)
        yield "---\n\n### The first, token by token\n\n" + _segmentation(segments[:300])


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers with commas, to the right."""
    rows = list(rows)
    columns = range(len(header))
    marks = ["---:" if rows and all(_is_number(row[i]) for row in rows) else "---" for i in columns]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [header, marks, *rows])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or re.fullmatch(r"\**[\d.,e+-]+( %)?\**", value) is not None


def cell(value: Any) -> str:
    """A value as the cell of a table."""
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    return str(value).replace("|", "\\|")


def code(text: str | bytes) -> str:
    """Text as code on one line: control characters, and blanks at the ends, made visible."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    shown = re.sub("^ +| +$", lambda blanks: "␣" * len(blanks.group()), shown)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if len(fence) > 1 else f"`{shown}`"


def _plain(text: str) -> str:
    """Text as Markdown in which nothing is markup."""
    lines = ("".join(filter(str.isprintable, line)) for line in text.split("\n"))
    return "  \n".join(re.sub(r"([\\`*_{}\[\]<>()#+.!|~&-])", r"\\\1", line) for line in lines)


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _histogram(title: str, x: str, counts: npt.NDArray[Any], edges: Any, y: str) -> str:
    """A picture of counts between edges, from the first that is filled to the last."""
    filled = np.flatnonzero(counts)
    first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 1)
    figure, axes = _figure(title, x, y)
    axes.bar(edges[first:last], counts[first:last], np.diff(edges[first : last + 1]), align="edge", edgecolor="white")
    if edges is _QUARTER_OCTAVES:
        axes.set_xscale("log", base=2)
        ticks = edges[first : last + 1 : (last - first) // 10 + 1]
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    return _image(figure, title)


def _image(figure: Any, alt: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return _picture(data.getvalue(), "image/png", alt)


def _picture(data: bytes, kind: str, alt: str) -> str:
    return f"![{alt}](data:{kind};base64,{base64.b64encode(data).decode()})"


def _segments(tokenizer: Tokenizer, text: str) -> list[str]:
    """The tokens of a text as :func:`_shown`."""
    return [_shown(tokenizer.vocab[token_id]) for token_id in tokenizer.encode(text, allowed_special=())]


def _shown(token: bytes) -> str:
    """A token as text; one that is no whole characters, or has some that cannot be shown, in hexadecimal."""
    text = token.decode("utf-8", "replace")
    is_plain = text.encode() == token and text.replace("\n", "").isprintable()
    return text if is_plain else token.hex(" ").upper()


def _segmentation(tokens: Sequence[str]) -> str:
    """A picture of text with every token on a ground of its own."""
    letter, line, width = 8.4, 24, 66  # pixels, pixels, letters
    boxes, column, row = [], 0, 0
    for number, token in enumerate(tokens):
        shown = token.replace("\n", "↵").replace(" ", "·")
        cells = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in shown)
        if column + cells > width and column:
            column, row = 0, row + 1
        x, y = 4 + column * letter, 4 + row * line
        boxes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{cells * letter:.1f}" height="{line - 4}" rx="3" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            f'<text x="{x:.1f}" y="{y + 15}" textLength="{cells * letter:.1f}">{html.escape(shown)}</text>'
        )
        column += cells
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{8 + width * letter:.0f}" height="{8 + (row + 1) * line}" '
        f'font-family="monospace" font-size="14"><rect width="100%" height="100%" fill="white"/>{"".join(boxes)}</svg>'
    )
    return _picture(svg.encode(), "image/svg+xml", "Text, each token on a ground of its own")
