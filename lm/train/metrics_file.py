"""The ``metrics.jsonl`` of a training: one JSON object per line, each with its ``step``."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lm.common.errors import translate_write_errors


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a ``metrics.jsonl`` up to the first damaged line, e.g. a line cut off by a crash."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of :func:`read_metrics`, one in memory at a time: a file of responses may have gigabytes."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    break
                yield row


def step_reporter(path: Path, progress: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that calls ``progress`` with the last step in a ``metrics.jsonl`` if the file has new rows.

    It reads only what was added since the last call, up to the last complete line.
    """
    end = 0  # of the lines that were read, in bytes

    def report() -> None:
        nonlocal end
        size = path.stat().st_size if path.exists() else 0
        if size < end:  # a resumed training drops the rows after its checkpoint
            end = 0
        if size == end:
            return
        with path.open("rb") as file:
            file.seek(end)
            lines = file.read().split(b"\n")[:-1]
        if not lines:
            return
        end += sum(len(line) + 1 for line in lines)
        try:
            step = json.loads(lines[-1])["step"]
        except (ValueError, RecursionError):  # a damaged line
            return
        progress(step)

    return report


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a ``metrics.jsonl``. Raises UserError if it cannot be written, e.g. on a full disk."""
    with translate_write_errors(path), path.open("a", encoding="utf-8") as file:
        file.writelines(map(format_row, rows))


def write_metrics(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a ``metrics.jsonl`` atomically. ``rows`` may be read from it meanwhile."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(map(format_row, rows))
    temporary.replace(path)


def format_row(row: dict[str, Any]) -> str:
    """Return the line of a ``metrics.jsonl`` for ``row``."""
    return json.dumps(replace_non_finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def replace_non_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity and NaN, which JSON does not have, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
