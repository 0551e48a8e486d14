"""Rows of CSV files, by the names of their header. The separator is the comma, the semicolon or the tab."""

import csv
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from lm.common.errors import UserError

_SEPARATORS = ",;\t"


def read_csv(
    lines: Iterable[tuple[int, bytes | None]], url: str, max_bytes: int
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name of the row, function that returns it or raises ValueError) for each row of a CSV file.

    ``lines`` are those of the file as (size, bytes without the line break), the bytes None if they are too many. The
    separator is the one that divides the header into the most names. An empty cell is None. A row is damaged if its
    cells are not as many as the names. Raises UserError, which names the line, if the file is not UTF-8, a quote is
    wrong (nothing says where the next row begins), a cell has more than ``max_bytes``, or a name is there twice.
    """
    numbered = _Lines(lines, url)
    first = next(numbered, "")
    separator = max(_SEPARATORS, key=lambda separator: len(next(csv.reader([first], delimiter=separator), ())))
    csv.field_size_limit(max_bytes)
    reader = csv.reader(chain([first], numbered), delimiter=separator, strict=True)
    names: list[str] = []
    while True:
        start = numbered.number + 1 if names else 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"{url}, line {start:,}: not CSV: {error}. A cell with a separator, a quote or a line break is in "
                "quotes, and a quote in it is written twice."
            ) from None
        if cells is None:
            return
        if not names:
            names = cells
            if repeated := [name for name in names if name and names.count(name) > 1]:
                raise UserError(f"{url}, line 1: the header has the name {repeated[0]!r} twice; rename a column.")
        elif cells:
            yield f"{url}, line {start:,}", partial(_name_cells, names, cells)


class _Lines(Iterator[str]):
    """The lines of a file as texts, and the number of the last."""

    def __init__(self, lines: Iterable[tuple[int, bytes | None]], url: str) -> None:
        self._lines, self._url, self.number = iter(lines), url, 0

    def __next__(self) -> str:
        size, line = next(self._lines)
        self.number += 1
        if line is None:
            raise UserError(f"{self._url}, line {self.number:,}: it is too long, {size:,} bytes. Is the file CSV?")
        try:
            return (line if self.number > 1 else line.removeprefix(BOM_UTF8)).decode() + "\n"
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._url}, line {self.number:,}: not UTF-8: byte 0x{line[error.start]:02x} at offset "
                f"{error.start:,}. Convert the file: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW."
            ) from None


def _name_cells(names: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(names):
        raise ValueError(f"it has {len(cells)} cells, the header {len(names)}; put a cell with a separator in quotes")
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}
