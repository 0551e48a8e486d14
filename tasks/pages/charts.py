"""Charts, and pictures of tokens, as Markdown images."""

import base64
import html
import io
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages.markdown import make_visible

if TYPE_CHECKING:
    import numpy.typing as npt

    from lm.tokenizer.tokenizer import Tokenizer

QUARTER_OCTAVES = 2 ** (np.arange(257) / 4)
_COLOURS = ("#cfe8ff", "#ffe3c2", "#d8f5d0", "#f5d6ee", "#fff3b0")
_COLUMN_PIXELS, _ROW_PIXELS, _COLUMNS = 8.4, 24, 66


def new_figure(*titles: str, size: tuple[float, float] = (8, 3.2), widths: Sequence[float] = (1,)) -> tuple[Any, ...]:
    """Return a new matplotlib figure and its axes: side by side, with these relative ``widths``.

    ``titles``: those of the first axes, of its x axis and of its y axis, all optional.
    """
    from matplotlib.figure import Figure  # slow to import

    figure: Any = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    all_axes[0].set(**dict(zip(("title", "xlabel", "ylabel"), titles, strict=False)))
    for axes in all_axes:
        axes.grid(alpha=0.3)
    return figure, *all_axes


def draw_lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw the points (x, y) of each label as a line; few points are marked."""
    for label, points in lines.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 30 else None)
    axes.legend()


def draw_bars(
    axes: Any,
    names: Sequence[str],
    series: Mapping[str, Iterable[float]],
    label_format: str = "",
    colours: Sequence[str] = (),
    is_horizontal: bool = False,
) -> None:
    """Draw a group of bars for each name, with one bar of each series. ``colours``: of the series, or of the bars of a
    single series. The legend names the series, unless all names are empty. ``label_format`` writes the values at the
    bars."""
    width = 0.8 / len(series)
    for number, values in enumerate(series.values()):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(names))]
        colour = {"color": list(colours) if len(series) == 1 else colours[number]} if colours else {}
        bars = (axes.barh if is_horizontal else axes.bar)(
            places, list(values), width, label=f"series {number}", **colour
        )
        if label_format:
            axes.bar_label(bars, fmt=label_format, padding=3, fontsize=8)
            axes.margins(**{"x" if is_horizontal else "y": 0.15})  # room for the labels
    set_ticks = axes.set_yticks if is_horizontal else axes.set_xticks
    set_ticks(range(len(names)), names, fontsize=8, parse_math=False)  # a dollar sign begins no formula
    if is_horizontal:
        axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    if any(series):
        legend = axes.legend(fontsize=8, ncols=len(series), loc="upper center", bbox_to_anchor=(0.5, -0.12))
        label_legend(legend, series)


def label_legend(legend: Any, names: Iterable[str]) -> None:
    """Write the names beside the lines or bars of a legend, as they are."""
    for entry, name in zip(legend.get_texts(), names, strict=True):
        entry.set(text=name, parse_math=False)  # as a label, matplotlib leaves out a name that begins with "_"


def histogram(
    title: str, x_label: str, counts: "npt.NDArray[Any]", edges: Any, y_label: str, limit: float | None = None
) -> str:
    """Draw counts between edges, from the first to the last bin that is not empty, and a line at ``limit``.

    The scale is logarithmic if no edge is 0.
    """
    filled = np.flatnonzero(counts)
    first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 1)
    figure, axes = new_figure(title, x_label, y_label)
    axes.bar(edges[first:last], counts[first:last], np.diff(edges[first : last + 1]), align="edge", edgecolor="white")
    if edges[0] > 0:
        axes.set_xscale("log", base=2)
        ticks = edges[first : last + 1 : (last - first) // 10 + 1]
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    if limit is not None:
        axes.axvline(limit, color="tab:red", linestyle="--")
    return embed_figure(figure, title)


def embed_figure(figure: Any, alt: str) -> str:
    """Return a matplotlib figure as a Markdown image."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return embed_image(png.getvalue(), "image/png", alt)


def embed_image(data: bytes, media_type: str, alt: str) -> str:
    """Return a Markdown image with a data URI."""
    return f"![{alt}](data:{media_type};base64,{base64.b64encode(data).decode()})"


def token_texts(tokenizer: "Tokenizer", text: str) -> list[str]:
    r"""Encode a text and return each token as a string. Bytes that are not printable are escaped, as in ``\xc3``."""
    tokens = (tokenizer.vocab[token_id] for token_id in tokenizer.encode(text, allowed_special=()))
    return ["\n".join(map(make_visible, token.split(b"\n"))) for token in tokens]


def token_picture(tokens: Sequence[str]) -> str:
    """Draw the tokens as an SVG and return it as a Markdown image."""
    boxes, column, row = [], 0, 0
    for number, token in enumerate(tokens):
        shown = token.replace("\n", "↵").replace(" ", "·")
        width = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in shown)
        if column and column + width > _COLUMNS:
            column, row = 0, row + 1
        x, y = 4 + column * _COLUMN_PIXELS, 4 + row * _ROW_PIXELS
        pixels = f"{width * _COLUMN_PIXELS:.1f}"
        boxes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{pixels}" height="{_ROW_PIXELS - 4}" rx="3" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            f'<text x="{x:.1f}" y="{y + 15}" textLength="{pixels}">{html.escape(shown)}</text>'
        )
        column += width
    size = f'width="{8 + _COLUMNS * _COLUMN_PIXELS:.0f}" height="{8 + (row + 1) * _ROW_PIXELS}"'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="14">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(boxes)}</svg>'
    )
    return embed_image(svg.encode(), "image/svg+xml", "Text with a background colour per token")
