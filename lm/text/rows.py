"""Rows of JSON Lines, JSON arrays, CSV and Parquet, local or by URL. Damaged rows are skipped, counted and named."""

import hashlib
import math
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from lm.common.errors import UserError
from lm.files.compression import detect_format, split_suffixes
from lm.files.json import parse_json
from lm.files.retry import is_transient_error
from lm.text.csv_rows import read_csv
from lm.text.json_arrays import begins_json_array, split_json_array
from lm.text.sources import open_decompressed, open_raw
from lm.text.utf8 import replace_surrogates

_MAX_ROW_BYTES = 16 << 20  # as Python objects, a row of empty lists has 30 times this size
_MAX_ROWS_NAMED = 100
_MAX_REASON_CHARACTERS = 300

Row = dict[str, Any]
T = TypeVar("T")


@dataclass
class DamagedRows:
    """Number of rows that were skipped, and the first 100 of them by file, line and reason."""

    count: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str, reason: str) -> None:
        """Count a row. ``name`` is its file and line."""
        self.count += 1
        if len(self.names) < _MAX_ROWS_NAMED:
            is_long = len(reason) > _MAX_REASON_CHARACTERS  # a reason may quote the row
            self.names.append(f"{name}: {reason[:_MAX_REASON_CHARACTERS]}{'…' * is_long}")

    def __str__(self) -> str:
        shown = "; ".join(self.names[:3])
        rows = "row was" if self.count == 1 else "rows were"
        return f"{self.count:,} damaged {rows} skipped: {shown}{'; …' if self.count > 3 else ''}"


def read_rows(url: str, damaged: DamagedRows, parse: Callable[[Row], T]) -> Iterator[T]:
    """Yield ``parse(row)`` for each row of a file, with any compression.

    It is Parquet or CSV (also ``.tsv``) by its name, a JSON array by its first character, JSON Lines otherwise.

    A row that is not valid, or for which ``parse`` raises ValueError with a reason, is added to ``damaged``. Lone
    surrogates become U+FFFD. Raises UserError if the file cannot be read, has no rows, or if all its rows are damaged.
    """
    row_count, damaged_before = 0, damaged.count
    for name, load in iterate_rows(url):
        row_count += 1
        try:
            parsed = parse(load())
        except ValueError as error:
            damaged.add(name, str(error))
        else:
            yield parsed
    if not row_count:
        raise UserError(f"{url} has no rows; give a file of JSON Lines, a JSON array, CSV or Parquet.")
    if damaged.count - damaged_before == row_count:
        raise UserError(f"{url} has no usable row. {damaged}.")


def iterate_rows(url: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield (name of the row, function that returns it or raises ValueError with a reason) for each row of a file.

    The name is its file and line or row. Raises UserError if the file cannot be read.
    """
    suffix = split_suffixes(url)[0]
    return {".parquet": _read_parquet, ".csv": _read_csv, ".tsv": _read_csv}.get(suffix, _read_json)(url)


def read_lines(
    url: str, digest: "hashlib._Hash | None" = None, max_bytes: float = math.inf
) -> Iterator[tuple[str, int, bytes | None]]:
    """Yield (name of the line, its byte offset, its bytes) for each line of JSON Lines. A byte order mark is left out.

    Lines end at ``\\n`` only: a JSON string may contain the other line breaks of ``str.splitlines``. The bytes are None
    for a line of more than ``max_bytes``. The stored bytes are added to ``digest``. Raises UserError if the file cannot
    be read or begins with a JSON array.
    """
    with open_decompressed(url, digest) as blocks:
        yield from _name_lines(_refuse_json_array(blocks, url), max_bytes)


def _name_lines(blocks: Iterable[bytes], max_bytes: float) -> Iterator[tuple[str, int, bytes | None]]:
    offset = 0
    for number, (size, line) in enumerate(_split_lines(blocks, max_bytes), start=1):
        # The byte order mark that some programs on Windows write.
        mark = BOM_UTF8 if number == 1 and line and line.startswith(BOM_UTF8) else b""
        yield f"line {number:,}", offset + len(mark), line and line.removeprefix(mark)
        offset += size + 1


def _refuse_json_array(blocks: Iterable[bytes], url: str) -> Iterator[bytes]:
    for number, block in enumerate(blocks):
        if not number and begins_json_array(block):
            raise UserError(
                f"{url} begins with a JSON array, not with JSON Lines. Write one object a line: jq -c '.[]' FILE."
            )
        yield block


def _split_lines(blocks: Iterable[bytes], max_bytes: float) -> Iterator[tuple[int, bytes | None]]:
    """Yield (size, bytes) of each line, which is split at ``\\n``. The bytes of a line of more than ``max_bytes`` are
    None, and not kept in memory."""
    parts: list[bytes] = []  # joined once per line: a line may span many blocks
    size = 0
    for block in blocks:
        for index, piece in enumerate(block.split(b"\n")):
            if index:
                yield size, b"".join(parts) if size <= max_bytes else None
                parts, size = [], 0
            size += len(piece)
            if size <= max_bytes:
                parts.append(piece)
            else:
                parts.clear()
    yield size, b"".join(parts) if size <= max_bytes else None


def _read_json(url: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    with open_decompressed(url) as blocks:
        head = next(blocks, b"")
        blocks = chain([head], blocks)
        if begins_json_array(head):
            for number, (value, text) in enumerate(split_json_array(blocks, url, _MAX_ROW_BYTES), start=1):
                yield f"{url}, row {number:,}", partial(_check_row, value, text)
            return
        for name, _, line in _name_lines(blocks, _MAX_ROW_BYTES):
            if line is None or line.strip():
                yield f"{url}, {name}", partial(_parse_json, line)


def _read_csv(url: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    with open_decompressed(url) as blocks:
        yield from read_csv(_split_lines(blocks, _MAX_ROW_BYTES), url, _MAX_ROW_BYTES)


def _parse_json(line: bytes | None) -> Row:
    if line is None:
        raise ValueError(f"longer than {_MAX_ROW_BYTES >> 20} MiB")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start:,}") from None
    return _check_row(parse_json(text), text)


def _check_row(row: Any, text: str) -> Row:
    """Return a row whose JSON text is ``text``, without lone surrogates."""
    if "\\ud" in text.lower():
        try:
            row = _replace_all_surrogates(row)
        except RecursionError as error:
            raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _replace_all_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_replace_all_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(name): _replace_all_surrogates(item) for name, item in value.items()}
    return value


@contextmanager
def open_parquet(url: str) -> Iterator[Any]:
    """Open a source as a ``pyarrow.parquet.ParquetFile``.

    Raises UserError if it is not a readable Parquet file, also inside the ``with``, and TransientError if the
    connection breaks.
    """
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    if detect_format(url)[1]:
        raise UserError(f"{url}: Parquet is compressed inside; decompress the file itself.")
    with open_raw(url, is_ranged=True) as raw:
        try:
            yield pq.ParquetFile(raw)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if is_transient_error(error):
                raise
            raise UserError(f"{url} is not a readable Parquet file: {error}") from None
        except ValueError as error:  # of fsspec
            if isinstance(error, UserError) or not url.startswith(("http://", "https://")):
                raise
            raise UserError(f"{url}: the web server serves no byte ranges. Download the file, and name that.") from None


def _read_parquet(url: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    with open_parquet(url) as file:
        number = 0
        for batch in file.iter_batches(batch_size=256):
            for index in range(len(batch)):
                number += 1
                yield f"{url}, row {number:,}", partial(_parse_parquet, batch.slice(index, 1))


def _parse_parquet(row: Any) -> Row:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except Exception as error:  # each type has its own, e.g. for a date after the year 9999
        raise ValueError(f"a value cannot be read: {error!r}") from None
