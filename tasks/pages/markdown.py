"""Tables and code in Markdown."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table. Columns of numbers are right-aligned."""
    rows = list(rows)
    columns = range(len(header))
    rules = ["---:" if rows and all(_is_right_aligned(row[i]) for row in rows) else "---" for i in columns]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [header, rules, *rows])


def _is_right_aligned(value: Any) -> bool:
    return isinstance(value, (int, float)) or re.fullmatch(r"\**[\d.,e+-]+( %)?\**", value) is not None


def plain(value: Any) -> str:
    """Return a value as text; whole numbers have thousands separators, others three decimals or four digits."""
    if isinstance(value, float):
        return f"{value:,.3f}" if value == 0 or 0.001 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def shorten(text: str) -> str:
    """Return the first 40 characters of a text, and a sign that there are more."""
    return text if len(text) <= 40 else f"{text[:39]}…"


def cell(value: Any) -> str:
    """Return a value as the text of a table cell, in one line. Prefect's UI takes a pipe after an odd number of
    backslashes as text."""
    line = re.sub(r"[\r\n]+", " ", plain(value))
    return re.sub(r"(\\*)\|", lambda pipe: pipe[1] + "\\" * (1 + len(pipe[1]) % 2) + "|", line)


def format_size(count: float) -> str:
    """Return a number of bytes with a unit: ``1.9 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


def code(text: str | bytes) -> str:
    """Return text as inline code. Control characters, and spaces at the ends, are made visible."""
    shown = re.sub("^ +| +$", lambda spaces: "␣" * len(spaces.group()), make_visible(text))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if len(fence) > 1 else f"`{shown}`"


def make_visible(text: str | bytes) -> str:
    r"""Return text with control characters, and bytes that are not UTF-8, as escapes such as ``\t`` and ``\xc3``."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it literally. Tabs become spaces, and spaces that begin a line stay."""
    return "  \n".join(map(_escape_line, text.expandtabs(4).split("\n")))


def _escape_line(line: str) -> str:
    shown = "".join(filter(lambda character: character.isprintable() or unicodedata.category(character) == "Zs", line))
    shown = re.sub("^ +", lambda spaces: "\u00a0" * len(spaces.group()), shown)  # four plain ones begin a code block
    return re.sub(r"([\\`*_{}\[\]<>()#+.!~&=-])", r"\\\1", shown)
