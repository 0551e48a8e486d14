"""The page of a comparison of tokenizers."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tasks.pages.markdown import code, escape_markdown, table
from tasks.pages.plots import embed_figure

if TYPE_CHECKING:
    from lm.tokenizer.compare import Comparison


def comparison_page(comparison: "Comparison") -> str:
    """Return the Markdown of a comparison, with two pictures."""
    return "\n\n".join(_parts(comparison))


def describe(comparison: "Comparison") -> str:
    """Return in one line what was compared."""
    return f"{', '.join(comparison.tokenizers)} on {', '.join(comparison.texts)}"


def compression_rows(comparison: "Comparison") -> list[tuple[Any, ...]]:
    """Return a row for each text: its name, its bytes, and the bytes per token of each tokenizer."""
    return [
        (text, size, *(comparison.bytes_per_token(text, name) for name in comparison.tokenizers))
        for text, (size, _) in comparison.texts.items()
    ]


def _parts(comparison: "Comparison") -> Iterator[str]:
    yield f"{escape_markdown(describe(comparison))}."
    yield "## Bytes per token"
    yield _draw_bars(comparison, "Bytes per token", comparison.bytes_per_token)
    yield table(
        ("text", "bytes", *map(escape_markdown, comparison.tokenizers)),
        [(escape_markdown(text), *figures) for text, *figures in compression_rows(comparison)],
    )
    yield "More bytes per token: fewer tokens to train on, and more text in a context."
    yield "### Characters per token\n\n" + _text_table(
        comparison, lambda text, name: comparison.texts[text][1] / comparison.tokenizers[name].encodings[text].tokens
    )
    yield "## Speed"
    yield _draw_bars(comparison, "MB per second", comparison.megabytes_per_second)
    yield _text_table(comparison, comparison.megabytes_per_second)
    yield "Megabytes per second of `encode` in one thread, the fastest of three."
    yield "## Words and vocabulary\n\nShare of words (runs of letters) that are more than one token:"
    yield _text_table(comparison, lambda text, name: _percent(comparison.tokenizers[name].encodings[text].split_words))
    yield "Use of the vocabulary:"
    yield table(
        ("tokenizer", "tokens", "in the texts", "share", "longest tokens with letters"),
        [
            (
                escape_markdown(name),
                compared.size,
                compared.used,
                _percent(compared.used / compared.size),
                " ".join(map(code, compared.longest)),
            )
            for name, compared in comparison.tokenizers.items()
        ],
    )


def _text_table(comparison: "Comparison", figure: Callable[[str, str], Any]) -> str:
    names = list(comparison.tokenizers)
    rows = [(escape_markdown(text), *(figure(text, name) for name in names)) for text in comparison.texts]
    return table(("text", *map(escape_markdown, names)), rows)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _draw_bars(comparison: "Comparison", label: str, figure: Callable[[str, str], float]) -> str:
    from matplotlib.figure import Figure  # slow to import

    drawing = Figure(figsize=(11, 3.4), layout="constrained")
    axes = drawing.add_subplot(ylabel=label)
    names, texts = list(comparison.tokenizers), list(comparison.texts)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(texts))]
        bars = axes.bar(places, [figure(text, name) for text in texts], width, label=f"tokenizer {number}")
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.margins(y=0.1)  # room for the labels
    axes.set_xticks(range(len(texts)), texts, parse_math=False)  # a dollar sign begins no formula
    legend = axes.legend(fontsize=8, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.12))
    for entry, name in zip(legend.get_texts(), names, strict=True):
        entry.set(text=name, parse_math=False)  # as a label, matplotlib leaves out a name that begins with "_"
    axes.spines[["top", "right"]].set_visible(False)
    return embed_figure(drawing, label)
