"""Pretoken counts: counting them, and their Parquet files of ``pretoken: binary, count: int64``.

A file has one row group for each of 16 partitions by a hash of the pretokens, so that many files are added up one
partition at a time; in each the most frequent pretoken comes first, equals in the order of their bytes.
Source: CS336 assignment 1 (section 2.4).
"""

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.buffers import new_cursor, not_utf8, windows
from lm.chunks import Range, in_file, open_stretch, stretches
from lm.corpus import decode_blocks
from lm.errors import NotUtf8, UserError
from lm.kernels import compiling
from lm.kernels import count as kernel
from lm.kernels.classes import character_classes
from lm.kernels.table import BYTES_USED, SLOTS_USED, WORDS, Table, make_table, make_workspace, with_more_slots
from lm.kernels.walk import SCANNED, TOO_SMALL, pack_specials
from lm.pretokens import GPT2_PATTERN, cut_safely, pretokenize, split_special

SCHEMA = pa.schema([("pretoken", pa.binary()), ("count", pa.int64())])
PARTITIONS = 16
_MOST = 1 << 48  # of one pretoken in a file; sums of thousands of files stay far from 2⁶³
DEFAULT_MEMORY = 512 << 20  # bytes, for one thread


def count_pretokens(
    texts: Iterable[Iterable[bytes]],
    special_tokens: Sequence[str],
    pattern: str = GPT2_PATTERN,
    memory: int = DEFAULT_MEMORY,
) -> Iterator[pa.Table]:
    """Count the pretokens of UTF-8 texts, each in blocks, cut at special tokens first; those are not counted.

    Yields tables of counts to be added up: one, but for texts with so many different pretokens that they would take
    more than ``memory`` bytes. Raises UserError where a text is not UTF-8.
    """
    if pattern != GPT2_PATTERN:
        yield from _count_by_pattern(texts, special_tokens, pattern, memory)
        return
    specials = pack_specials([(token.encode(), 0) for token in special_tokens])
    work, cursor, table = make_workspace(SCANNED), new_cursor(), make_table(1 << 16, 1 << 20)
    for blocks in texts:
        for buffer, end, final in windows(blocks, cursor):
            while status := _count(buffer, end, final, cursor, character_classes(), specials, table, work):
                if status == TOO_SMALL:
                    work = make_workspace(2 * len(work.starts))
                elif status < kernel.NO_ARENA:
                    raise not_utf8(buffer, cursor, -5 - status)
                elif 3 * (table.slots.nbytes + table.arena.nbytes) > memory and table.used[SLOTS_USED]:
                    yield _columns(table)
                    table = make_table(len(table.slots) // WORDS, len(table.arena))
                elif status == kernel.NO_ARENA:
                    arena = np.zeros(2 * (len(table.arena) + len(buffer)), np.uint8)
                    arena[: len(table.arena)] = table.arena
                    table = table._replace(arena=arena)
                else:
                    table = with_more_slots(table, 2)
    yield _columns(table)


def _count(*arguments: Any) -> int:
    with compiling("counting"):
        return kernel.count(*arguments)


def _columns(table: Table) -> pa.Table:
    rows = int(table.used[SLOTS_USED])
    data = np.empty(int(table.used[BYTES_USED]) + 16, np.uint8)
    ends, counts = np.zeros(rows + 1, np.int32), np.empty(rows, np.int64)
    kernel.columns(table, data, ends, counts)
    pretokens = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return pa.table([pretokens, pa.array(counts)], schema=SCHEMA)


def _count_by_pattern(
    texts: Iterable[Iterable[bytes]], special_tokens: Sequence[str], pattern: str, memory: int
) -> Iterator[pa.Table]:
    counts: Counter[str] = Counter()
    for blocks in texts:
        for piece in cut_safely(decode_blocks(blocks, "the text"), special_tokens, pattern, size=1 << 16):
            for part, is_special in split_special(piece, special_tokens):
                if not is_special:
                    counts.update(pretokenize(part, pattern))
            if len(counts) * 200 > memory:
                yield _table(counts)
                counts.clear()
    yield _table(counts)


def _table(counts: Counter[str]) -> pa.Table:
    return pa.table([[pretoken.encode() for pretoken in counts], list(counts.values())], schema=SCHEMA)


def count_to_file(
    path: Path, texts: Iterable[Iterable[bytes]], special_tokens: Sequence[str], pattern: str, memory: int
) -> tuple[int, int]:
    """Count as :func:`count_pretokens` and write one file of counts; what does not fit in memory goes there by way of
    files beside it. Returns (pretokens, different ones)."""
    parts: list[Path] = []
    for table in count_pretokens(texts, special_tokens, pattern, memory):
        parts.append(path.with_name(f"{path.name}.{len(parts)}"))
        totals = write_counts(parts[-1], table)
    if len(parts) == 1:
        parts[0].replace(path)
        return totals
    totals = merge_counts(parts, path)
    for part in parts:
        part.unlink()
    return totals


def count_files(
    paths: Sequence[str | Path], special_tokens: Sequence[str], pattern: str = GPT2_PATTERN, threads: int | None = None
) -> pa.Table:
    """Count the pretokens of text files, plain or compressed, on all cores or as many ``threads``; see
    :func:`count_pretokens`. The order of the rows is not defined."""
    workers = threads or os.cpu_count() or 1
    pending = deque(stretches(paths, special_tokens, pattern))

    def count() -> list[pa.Table]:
        stretch: tuple[str, Range | None] = "", None

        def texts() -> Iterator[Iterator[bytes]]:
            nonlocal stretch
            while True:
                try:
                    stretch = pending.popleft()
                except IndexError:  # another thread took the last
                    return
                with open_stretch(*stretch) as blocks:
                    yield blocks

        try:
            return list(count_pretokens(texts(), special_tokens, pattern))
        except NotUtf8 as error:
            pending.clear()  # the other threads need not go on
            raise in_file(error, *stretch) from None

    with ThreadPoolExecutor(workers) as pool:
        counts = [pool.submit(count) for _ in range(workers)]
        return add_up(table for future in counts for table in future.result())


def add_up(tables: Iterable[pa.Table]) -> pa.Table:
    """One table of counts from many."""
    found = list(tables)
    if len(found) == 1:
        return found[0]
    summed = pa.concat_tables(found).group_by("pretoken").aggregate([("count", "sum")])
    return summed.rename_columns(SCHEMA.names).cast(SCHEMA)


def write_counts(path: Path, table: pa.Table) -> tuple[int, int]:
    """Write counts by partition, in order; returns (pretokens, different pretokens)."""
    table = table.combine_chunks()
    number = np.empty(len(table), np.uint8)
    if len(table):
        kernel.partition(*columns_of(table)[:2], PARTITIONS, number)
    return _write(path, (table.filter(pa.array(number == partition)) for partition in range(PARTITIONS)))


def merge_counts(parts: Sequence[Path], path: Path) -> tuple[int, int]:
    """Add up files of counts, one partition at a time; returns (pretokens, different pretokens)."""
    files = [(part, _open(part)) for part in parts]
    return _write(path, (add_up(_read(*file, [partition]) for file in files) for partition in range(PARTITIONS)))


def _write(path: Path, partitions: Iterable[pa.Table]) -> tuple[int, int]:
    total = unique = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for table in partitions:
            writer.write_table(table.sort_by([("count", "descending"), ("pretoken", "ascending")]))
            total += pc.sum(table["count"]).as_py() or 0
            unique += len(table)
    return total, unique


def read_counts(path: Path) -> pa.Table:
    """The counts of a file: columns ``pretoken`` and ``count``."""
    return _read(path, _open(path), range(PARTITIONS))


def columns_of(table: pa.Table) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The counts as arrays: the pretokens' bytes joined, where each ends (after a first entry 0), their counts."""
    pretokens = pa.concat_arrays(table["pretoken"].chunks) if len(table) else pa.array([], pa.binary())
    _, ends, data = pretokens.buffers()
    ends = np.frombuffer(ends, np.int32)[pretokens.offset : pretokens.offset + len(pretokens) + 1]
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), ends, table["count"].to_numpy()


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file of pretoken counts: {error}") from None
    if not file.schema_arrow.equals(SCHEMA) or file.num_row_groups != PARTITIONS:
        raise UserError(f"{path} is not a Parquet file of pretoken counts: its columns are {file.schema_arrow.names}.")
    return file


def _read(path: Path, file: pq.ParquetFile, partitions: Sequence[int]) -> pa.Table:
    try:
        table = file.read_row_groups(list(partitions))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    least, most = pc.min_max(table["count"]).as_py().values()
    if any(column.null_count for column in table.columns) or (len(table) and not 1 <= least <= most <= _MOST):
        raise UserError(f"{path} is not a Parquet file of pretoken counts: not all rows have a pretoken and its count.")
    return table
