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
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.metrics import flops_per_token, parameter_count, plot_metrics, read_metrics
from lm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tasks.stage import Draft, Output

_SENTENCE = (
    "Once upon a time there wasn't any tokenizer: in 1994 «byte pair encoding» only compressed files. "
    "Naïve café, 東京 and 🙂 cost more tokens than plain words do."
)
_QUARTER_OCTAVES = 2 ** (np.arange(257) / 4)
_COLOURS = ("#cfe8ff", "#ffe3c2", "#d8f5d0", "#f5d6ee", "#fff3b0")


def ingest(out: "Draft", **inputs: Any) -> str:
    """Documents, bytes, where they came from, and how long the documents are."""
    found = json.loads((out.directory / "texts.json").read_text(encoding="utf-8"))["statistics"]
    rows = [
        (split, tally["documents"], tally["bytes"], tally["replaced"], tally["separators_removed"])
        for split, tally in found.items()
    ]
    sources = [(code(source.url), source.bytes, code(source.sha256[:12])) for source in out.sources]
    lengths = np.sum([tally["lengths"] for tally in found.values()], axis=0)
    return "\n\n".join(
        [
            _table(("text", "documents", "bytes", "invalid sequences replaced", "separators removed"), rows),
            _histogram("Length of the documents", "characters", lengths, _QUARTER_OCTAVES, "documents"),
            _table(("source", "bytes as stored", "sha256"), sources[:20]),
            f"… and {len(sources) - 20:,} more sources." if len(sources) > 20 else "",
        ]
    )


def chunk(out: "Draft", **inputs: Any) -> str:
    """How many chunks there are and how large."""
    chunks = json.loads((out.directory / "chunks.json").read_text(encoding="utf-8"))
    sizes = {
        split: [sum(part["end"] - part["start"] for part in ranges) for ranges in found]
        for split, found in chunks.items()
    }
    rows = [
        (split, len(found), sum(found), min(found, default=0), max(found, default=0)) for split, found in sizes.items()
    ]
    counts, edges = np.histogram([size / 1e6 for found in sizes.values() for size in found], bins=20)
    return "\n\n".join(
        [
            _table(("text", "chunks", "bytes", "smallest", "largest"), rows),
            _histogram("Size of the chunks", "MB", counts, edges, "chunks"),
        ]
    )


def count(out: "Draft", parts: "list[Output]") -> str:
    """The commonest and the longest pretokens, and how counts fall with rank."""
    table = pq.read_table(out.directory / "counts.parquet").sort_by(
        [("count", "descending"), ("pretoken", "ascending")]
    )
    counts = table["count"].to_numpy()
    commonest = [
        (code(pretoken), number, f"{100 * number / counts.sum():.2f} %")
        for pretoken, number in zip(table["pretoken"][:20].to_pylist(), counts[:20].tolist(), strict=True)
    ]
    lengths = pc.binary_length(table["pretoken"])
    order = pc.select_k_unstable(lengths, k=min(10, len(table)), sort_keys=[("not needed", "descending")])
    longest = [
        (code(pretoken[:80]), len(pretoken), number)
        for pretoken, number in zip(*(column.to_pylist() for column in table.take(order).columns), strict=True)
    ]
    figure, axes = _figure("Zipf's law: how often the pretoken of each rank occurs", "rank", "count")
    ranks = np.unique(np.geomspace(1, max(1, len(counts)), 400).astype(int))
    if len(counts):
        axes.loglog(ranks, counts[ranks - 1])
    return "\n\n".join(
        [
            f"**{int(counts.sum()):,}** pretokens, **{len(counts):,}** different ones, from {len(parts):,} chunks.",
            _image(figure, "Counts by rank"),
            "### Commonest\n\n" + _table(("pretoken", "count", "share"), commonest),
            "### Longest\n\n" + _table(("pretoken", "bytes", "count"), longest),
        ]
    )


def merge(out: "Draft", **inputs: Any) -> str:
    """The tokenizer's card."""
    tokenizer = Tokenizer.load(out.directory / "tokenizer")
    learned = tokenizer.vocab.keys() - tokenizer.special_ids.values()
    longest = sorted(learned, key=lambda token_id: (-len(tokenizer.vocab[token_id]), token_id))[:20]
    lengths = np.bincount([len(tokenizer.vocab[token_id]) for token_id in learned])
    segments = _segments(tokenizer, _SENTENCE)
    return "\n\n".join(
        [
            f"**{tokenizer.size:,}** token ids: 256 bytes, {len(tokenizer.merges):,} merges, special tokens "
            + ", ".join(map(code, tokenizer.special_tokens))
            + f". Pattern: {code(tokenizer.pattern)}",
            f"### A sentence in {len(segments)} tokens\n\n" + _segmentation(segments),
            _histogram("Length of the tokens", "bytes", lengths, np.arange(len(lengths) + 1) - 0.5, "token ids"),
            "### Longest tokens\n\n"
            + _table(
                ("id", "token", "bytes"),
                [(str(key), code(tokenizer.vocab[key]), len(tokenizer.vocab[key])) for key in longest],
            ),
        ]
    )


def encode(out: "Draft", train: "list[Output]", valid: "list[Output]", **inputs: Any) -> str:
    """Tokens, compression, speed, and how long the documents are."""
    rows = [
        (split, len(parts), *(out.figures[split][name] for name in ("documents", "bytes", "tokens", "bytes_per_token")))
        for split, parts in (("train", train), ("valid", valid))
    ]
    lengths = np.zeros(len(_QUARTER_OCTAVES) - 1, int)
    for part in (*train, *valid):
        tokens = np.diff(np.load(part.path("documents.npy")), prepend=0)
        lengths += np.histogram(tokens, _QUARTER_OCTAVES)[0]
    return "\n\n".join(
        [
            _table(("text", "shards", "documents", "bytes", "tokens", "bytes a token"), rows),
            _speed((*train, *valid)),
            _histogram("Length of the documents", "tokens", lengths, _QUARTER_OCTAVES, "documents"),
        ]
    )


def _speed(parts: "Sequence[Output]") -> str:
    """Throughput of the run that made the most recent of the parts."""
    runs = [part.manifest["made"] for part in parts]
    latest = max(runs, key=lambda made: made["started"])["run"]
    made = [(part.manifest["figures"]["bytes"], run) for part, run in zip(parts, runs, strict=True)]
    made = [(size, run) for size, run in made if run["run"] == latest]
    size = sum(size for size, _ in made) / 1e6
    started, ended = min(run["started"] for _, run in made), max(run["started"] + run["seconds"] for _, run in made)
    return (
        f"Run `{latest}` encoded {size:,.1f} MB ({len(made)} of {len(parts)} shards) at "
        f"**{size / max(1e-9, ended - started):.2f} MB/s**, "
        f"{size / max(1e-9, sum(run['cpu_seconds'] for _, run in made)):.2f} MB a second of one core."
    )


def train(out: "Draft", tokenizer: "Output", model: Any, config: Any, **inputs: Any) -> str:
    """Loss plot, result, size and cost of the model, samples over time, configuration."""
    vocab_size = model.vocab_size or tokenizer.manifest["figures"]["vocab_size"]
    shape = type(model)(**{**asdict(model), "vocab_size": vocab_size})
    parameters, flops = parameter_count(shape), flops_per_token(shape)
    result = out.figures
    losses = (
        []
        if result["valid_loss"] is None
        else [
            ("loss, nats a token", f"{result['valid_loss']:.4f}"),
            ("**bits per byte**", f"**{result['valid_bits_per_byte']:.4f}**"),
        ]
    )
    rows = [
        ("steps", result["steps"]),
        ("tokens seen", result["tokens"]),
        ("parameters", parameters["total"]),
        *((f"… {part.replace('_', ' ')}", number) for part, number in parameters.items() if part != "total"),
        ("FLOPs a token, forward and backward", flops),
        ("FLOPs of the training", f"{flops * result['tokens']:.3g}"),
    ]
    samples = [
        (sample["step"], code(sample["prompt"]), code(sample["text"]))
        for sample in read_metrics(out.directory / "samples.jsonl")
    ]
    settings = [(name, code(json.dumps(value))) for part in (shape, config) for name, value in asdict(part).items()]
    return "\n\n".join(
        [
            _picture((out.directory / "loss.png").read_bytes(), "image/png", "Loss and learning rate over the steps"),
            _table(("the whole validation text", ""), losses) if losses else "There was no validation text.",
            f"Best checkpoint: {code(result['best'])}; the last: {code(result['last'])}.",
            _table(("size and cost", ""), rows),
            "### Samples over time\n\n" + _table(("step", "prompt", "goes on"), samples[:: len(samples) // 20 + 1]),
            "### Configuration\n\n" + _table(("field", "value"), settings),
        ]
    )


def training_so_far(directory: Path) -> str:
    """The loss plot of a training that runs in ``directory``; empty before its first figures."""
    rows = read_metrics(directory / "metrics.jsonl")
    if not rows:
        return ""
    plot = io.BytesIO()
    plot_metrics(rows, plot)
    return _picture(plot.getvalue(), "image/png", f"Loss and learning rate, up to step {rows[-1]['step']:,}")


def sample(out: "Draft", tokenizer: "Output", **inputs: Any) -> str:
    """The samples, and the first of them token by token."""
    samples = json.loads((out.directory / "samples.json").read_text(encoding="utf-8"))
    loaded = Tokenizer.load(tokenizer.directory("tokenizer"))
    pages = [f"{code(sample['prompt'])} goes on:\n\n{_plain(sample['text'])}" for sample in samples]
    if samples:
        segments = _segments(loaded, samples[0]["prompt"] + samples[0]["text"])
        pages.append("### The first, token by token\n\n" + _segmentation(segments[:300]))
    return "\n\n---\n\n".join(pages)


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers with commas, to the right."""
    rows = list(rows)
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    return "\n".join(lines)


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
    shown = "␣" * (len(shown) - len(shown.lstrip(" "))) + shown.strip(" ") + "␣" * (len(shown) - len(shown.rstrip(" ")))
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


def _histogram(title: str, x: str, counts: npt.ArrayLike, edges: Any, y: str) -> str:
    """A picture of counts between edges, from the first that is filled to the last."""
    counts = np.asarray(counts)
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
    """The tokens of a text; one that is no whole characters, or has some that cannot be shown, in hexadecimal."""

    def shown(token: bytes) -> str:
        text = token.decode("utf-8", "replace")
        is_plain = text.encode() == token and text.replace("\n", "").isprintable()
        return text if is_plain else token.hex(" ").upper()

    return [shown(tokenizer.vocab[token_id]) for token_id in tokenizer.encode(text, allowed_special=())]


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
