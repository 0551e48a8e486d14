"""Tables and code in Markdown."""

import re
from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table. Columns of numbers are right-aligned."""
    rows = list(rows)
    columns = range(len(header))
    rules = ["---:" if rows and all(_is_number(row[i]) for row in rows) else "---" for i in columns]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [header, rules, *rows])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or re.fullmatch(r"\**[\d.,e+-]+( %)?\**", value) is not None


def cell(value: Any) -> str:
    """Return a value as the text of a table cell; numbers have thousands separators."""
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    return str(value).replace("|", "\\|")


def code(text: str | bytes) -> str:
    """Return text as inline code. Control characters, and spaces at the ends, are made visible."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    shown = re.sub("^ +| +$", lambda spaces: "␣" * len(spaces.group()), shown)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if len(fence) > 1 else f"`{shown}`"


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it literally."""
    lines = ("".join(filter(str.isprintable, line)) for line in text.split("\n"))
    return "  \n".join(re.sub(r"([\\`*_{}\[\]<>()#+.!|~&-])", r"\\\1", line) for line in lines)
