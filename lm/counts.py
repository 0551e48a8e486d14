"""Pretoken counts: counting them, and their Parquet files of ``pretoken: binary, count: int64``.

Source: CS336 assignment 1 (section 2.4).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.errors import UserError
from lm.pretokens import GPT2_PATTERN, cut_safely, pretokenize, split_special

SCHEMA = pa.schema([("pretoken", pa.binary()), ("count", pa.int64())])


def count_pretokens(blocks: Iterable[str], special_tokens: Sequence[str], pattern: str = GPT2_PATTERN) -> Counter[str]:
    """Count the pretokens of the text that ``blocks`` join to, cut at special tokens first; those are not counted."""
    counts: Counter[str] = Counter()
    for piece in cut_safely(blocks, special_tokens, pattern, size=1 << 16):
        for part, is_special in split_special(piece, special_tokens):
            if not is_special:
                counts.update(pretokenize(part, pattern))
    return counts


def write_counts(path: Path, counts: Counter[str]) -> None:
    """Write counts in the order of the pretokens' bytes."""
    rows = sorted((pretoken.encode(), count) for pretoken, count in counts.items())
    columns = [[pretoken for pretoken, _ in rows], [count for _, count in rows]]
    pq.write_table(pa.table(columns, schema=SCHEMA), path, compression="zstd")


def merge_counts(parts: Iterable[Path], path: Path) -> int:
    """Add up Parquet counts and write them ordered: the most frequent first, equal counts by the pretokens' bytes.

    Returns the number of different pretokens.
    """
    table = pa.concat_tables([_read(part) for part in parts])
    summed = table.group_by("pretoken").aggregate([("count", "sum")]).rename_columns(["pretoken", "count"])
    order = pc.sort_indices(summed, sort_keys=[("count", "descending"), ("pretoken", "ascending")])
    pq.write_table(summed.take(order).cast(SCHEMA), path, compression="zstd")
    return len(summed)


def read_counts(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield (pretoken, count) in the file's order."""
    table = _read(path)
    return zip(table["pretoken"].to_pylist(), table["count"].to_pylist(), strict=True)


def _read(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} is not a Parquet file of pretoken counts: {error}") from None
    if not table.schema.equals(SCHEMA):  # read_table(schema=SCHEMA) would fill missing columns with nulls
        raise UserError(f"{path} is not a Parquet file of pretoken counts: its columns are {table.schema.names}.")
    return table
