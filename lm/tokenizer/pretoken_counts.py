"""Count pretokens; read, write and summarize Parquet files of counts (``pretoken: binary, count: int64``).

A file has 16 row groups, one for each partition of the pretokens by hash, so that many files can be summed one
partition at a time. In a partition the counts descend; pretokens with equal counts are in byte order.
Source: CS336 assignment 1 (section 2.4).
"""

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.common.errors import InvalidUtf8Error, UserError
from lm.hardware.cpu import available_cpus
from lm.kernels.bpe import count as kernel
from lm.kernels.bpe.pretoken_table import SLOT_WORDS, Table, grow_arena, grow_table, make_table, make_workspace
from lm.kernels.bpe.pretokens import SCAN_BYTES, new_cursor, pack_specials
from lm.kernels.bpe.scanners.registry import SCANNERS
from lm.kernels.jit import ARENA_FULL, INVALID_UTF8, WORKSPACE_FULL, log_compilation
from lm.text.character_tables import installed_tables, scanner_classes
from lm.text.chunks import FilePart, split_files
from lm.text.patterns import PATTERN_NAMES, resolve_pattern, warn_of_slow_pattern
from lm.text.pretokenize import GPT2_PATTERN, Pattern, split_at_safe_cuts
from lm.text.text_windows import WINDOW, not_utf8, text_windows
from lm.text.utf8 import decode_utf8_blocks
from lm.tokenizer.pattern_process import PatternProcesses, count_job, count_pieces, map_pieces

SCHEMA = pa.schema([("pretoken", pa.binary()), ("count", pa.int64())])
NUM_PARTITIONS = 16
DEFAULT_MEMORY_BYTES = 512 << 20  # of one thread
_MAX_COUNT = 1 << 48  # keeps the sums of thousands of files below 2**63
_MAX_COLUMN_BYTES = 1 << 29  # the offsets of an Arrow column are int32, and a table grows by doubling
_COUNTER_ENTRY_BYTES = 200  # estimate


class FrequentPretokens(NamedTuple):
    """The pretokens that occur at least a number of times."""

    unique: int
    """Different ones."""
    bytes: int
    """Bytes of the different ones."""
    total: int
    """Occurrences."""


@dataclass
class CountsSummary:
    """What a file of counts contains."""

    kept: dict[int, FrequentPretokens]
    """By minimum count."""
    common: list[tuple[bytes, int]]
    """The most common pretokens and their counts, descending."""
    longest: list[tuple[bytes, int]]
    """The longest pretokens and their counts, descending by length."""
    counts_by_rank: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    """At most 400 ranks, from 1, and the counts of the pretokens of these ranks."""

    @property
    def total(self) -> int:
        """All pretokens."""
        return self.kept[1].total

    @property
    def unique(self) -> int:
        """Different pretokens."""
        return self.kept[1].unique


def count_pretokens(
    texts: Iterable[Iterable[bytes]],
    special_tokens: Sequence[str],
    pattern: str = GPT2_PATTERN,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> Iterator[pa.Table]:
    """Count the pretokens of UTF-8 ``texts``, each an iterable of blocks. Special tokens are not counted.

    Yields tables with the columns of :data:`SCHEMA`, one for each ``memory_bytes`` of different pretokens; their sum is
    the count. Raises UserError if a text is not UTF-8.
    """
    pattern = resolve_pattern(pattern)
    if pattern not in PATTERN_NAMES:
        warn_of_slow_pattern(pattern)
        yield from _count_custom_pattern(texts, special_tokens, pattern, memory_bytes)
        return
    scanner = SCANNERS[PATTERN_NAMES[pattern]]
    classes = scanner_classes(scanner, installed_tables())
    specials = pack_specials([(token.encode(), 0) for token in special_tokens])
    work, cursor, table = make_workspace(SCAN_BYTES), new_cursor(), make_table(1 << 16, 1 << 20)
    for blocks in texts:
        for buffer, end, final in text_windows(blocks, cursor):
            while True:
                with log_compilation(f"counting{scanner.kernel_suffix}"):
                    text = buffer, end, final, cursor, classes, scanner.rules, specials
                    status = kernel.count_pretokens(*text, table, work)
                if not status:
                    break
                if status == WORKSPACE_FULL:
                    work = make_workspace(2 * len(work.starts))
                elif status <= INVALID_UTF8:
                    raise not_utf8(buffer, cursor, INVALID_UTF8 - status)
                elif table.used[0]["slots"] and _is_full(table, memory_bytes):
                    yield table_from_slots(table)
                    table = make_table(len(table.slots) // SLOT_WORDS, len(table.arena))
                elif status == ARENA_FULL:
                    table = grow_arena(table, 2 * end)
                else:
                    table = grow_table(table, 2)
    yield table_from_slots(table)


def is_long(table: Table) -> bool:
    """Return whether a larger table would have more bytes than the offsets of a column can count."""
    return bool(table.used[0]["pretoken_bytes"] > _MAX_COLUMN_BYTES)


def _is_full(table: Table, memory_bytes: int) -> bool:
    """Return whether a larger table would exceed the memory, or be too long for a column."""
    return is_long(table) or 3 * (table.slots.nbytes + table.arena.nbytes) > memory_bytes


def table_from_slots(table: Table) -> pa.Table:
    """Return the pretokens of a kernel's table and their counts, with the columns of :data:`SCHEMA`."""
    rows = int(table.used[0]["slots"])
    data = np.empty(int(table.used[0]["pretoken_bytes"]) + 16, np.uint8)
    ends, counts = np.zeros(rows + 1, np.int32), np.empty(rows, np.int64)
    kernel.export_columns(table, data, ends, counts)
    pretokens = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return pa.table([pretokens, pa.array(counts)], schema=SCHEMA)


def _count_custom_pattern(
    texts: Iterable[Iterable[bytes]], special_tokens: Sequence[str], pattern: Pattern, memory_bytes: int
) -> Iterator[pa.Table]:
    pieces = (
        piece
        for blocks in texts
        for piece in split_at_safe_cuts(decode_utf8_blocks(blocks, "the text"), special_tokens, pattern, WINDOW)
    )
    counts: Counter[str] = Counter()
    processes = PatternProcesses(lambda: count_job(special_tokens, pattern))
    for piece in map_pieces(pieces, lambda text: count_pieces(text, special_tokens, pattern), processes, json.loads):
        counts.update(piece)
        if len(counts) * _COUNTER_ENTRY_BYTES > memory_bytes:
            yield _table_from_counter(counts)
            counts.clear()
    yield _table_from_counter(counts)


def _table_from_counter(counts: Counter[str]) -> pa.Table:
    return pa.table([[pretoken.encode() for pretoken in counts], list(counts.values())], schema=SCHEMA)


def _count_rows(
    texts: Iterable[Iterable[bytes]], separator: str, special_tokens: Sequence[str], pattern: str, memory_bytes: int
) -> Iterator[pa.Table]:
    """Count as :func:`count_pretokens` texts in which ``separator`` is the only special token.

    Leaves out pretokens that contain the text of another one: a merge must not make a second token of that text.
    """
    search = "|".join(re.escape(token) for token in special_tokens)
    for table in count_pretokens(texts, [separator], pattern, memory_bytes):
        yield table.filter(pc.invert(pc.match_substring_regex(table["pretoken"], search)))


def count_to_file(
    path: Path,
    texts: Iterable[Iterable[bytes]],
    special_tokens: Sequence[str],
    pattern: str,
    memory_bytes: int,
    rows: Mapping[str, Iterable[Iterable[bytes]]] | None = None,
) -> tuple[int, int]:
    """Write the counts of :func:`count_pretokens` to one file, by way of temporary files if they exceed the memory.

    ``rows``: more texts, by the only special token in them. Returns (pretokens, different pretokens).
    """
    parts: list[Path] = []
    tables = [count_pretokens(texts, special_tokens, pattern, memory_bytes)]
    for separator, row_texts in (rows or {}).items():
        tables.append(_count_rows(row_texts, separator, special_tokens, pattern, memory_bytes))
    for table in chain.from_iterable(tables):
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
    """Count the pretokens of text files, plain or compressed, with ``threads`` threads (default: one per CPU core).

    The order of the rows is undefined. Needs the memory of two or three tables of the result's size, or
    :data:`DEFAULT_MEMORY_BYTES`, and :data:`DEFAULT_MEMORY_BYTES` for each thread.
    """
    if threads is not None and threads < 1:
        raise UserError(f"threads is {threads}; it must be at least 1.")
    workers, pattern = threads or available_cpus(), resolve_pattern(pattern)
    pending = deque(split_files(paths, special_tokens, pattern))
    tables: list[pa.Table] = []
    lock = Lock()

    def count() -> None:
        part = FilePart("")

        def texts() -> Iterator[Iterator[bytes]]:
            nonlocal part
            while True:
                try:
                    part = pending.popleft()
                except IndexError:
                    return
                with part.open() as blocks:
                    yield blocks

        try:
            for table in count_pretokens(texts(), special_tokens, pattern):
                with lock:
                    append_counts(tables, table)
        except BaseException as error:
            pending.clear()  # stops the other threads
            if isinstance(error, InvalidUtf8Error):
                raise part.locate(error) from None
            raise

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(count) for _ in range(workers)]:
            future.result()
    return sum_counts(tables)


def append_counts(tables: list[pa.Table], table: pa.Table) -> None:
    """Append a table, and replace the tables by their sum whenever they have twice the size of their first."""
    tables.append(table)
    if sum(table.nbytes for table in tables) > max(DEFAULT_MEMORY_BYTES, 2 * tables[0].nbytes):
        tables[:] = [sum_counts(tables)]


def sum_counts(tables: Sequence[pa.Table]) -> pa.Table:
    """Return one table with the sums of the counts of many tables."""
    if len(tables) == 1:
        return tables[0]
    summed = pa.concat_tables(tables).group_by("pretoken").aggregate([("count", "sum")])
    return summed.rename_columns(SCHEMA.names).cast(SCHEMA)


def write_counts(path: Path, table: pa.Table) -> tuple[int, int]:
    """Write a table of counts to a file; return (pretokens, different pretokens)."""
    table = table.combine_chunks()
    partitions = np.zeros(len(table), np.uint8)
    if len(table):
        kernel.assign_partitions(*counts_to_arrays(table)[:2], NUM_PARTITIONS, partitions)
    return _write_partitions(path, (table.filter(pa.array(partitions == i)) for i in range(NUM_PARTITIONS)))


def merge_counts(parts: Sequence[Path], path: Path) -> tuple[int, int]:
    """Write the sum of the files ``parts`` to one file; return (pretokens, different pretokens).

    One file at a time is open, as processes may open only so many.
    """
    return _write_partitions(path, (_sum_partition(parts, partition) for partition in range(NUM_PARTITIONS)))


def _sum_partition(parts: Sequence[Path], partition: int) -> pa.Table:
    tables: list[pa.Table] = []
    for part in parts:
        with _open(part) as file:
            append_counts(tables, _read(part, file, partition))
    return sum_counts(tables)


def _write_partitions(path: Path, partitions: Iterable[pa.Table]) -> tuple[int, int]:
    total = unique = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for table in partitions:
            table = table.sort_by([("count", "descending"), ("pretoken", "ascending")])
            writer.write_table(table, row_group_size=max(1, len(table)))  # by default at most 1,048,576 rows
            total += pc.sum(table["count"]).as_py() or 0
            unique += len(table)
    return total, unique


def read_counts(path: Path, min_count: int = 1) -> pa.Table:
    """Read a file of counts, without the pretokens that occur fewer than ``min_count`` times.

    Needs memory for one partition and for the result. Raises UserError if the file is malformed.
    """
    return pa.concat_tables(table.filter(pc.field("count") >= min_count) for table in read_partitions(path))


def read_partitions(path: Path) -> Iterator[pa.Table]:
    """Yield the partitions of a file of counts. Raises UserError if it is malformed."""
    file = _open(path)
    return (_read(path, file, partition) for partition in range(NUM_PARTITIONS))


def summarize_counts(
    path: Path, min_counts: Sequence[int], num_common: int = 20, num_longest: int = 10
) -> CountsSummary:
    """Summarize a file of counts one partition at a time. ``min_counts`` must include 1."""
    kept = dict.fromkeys(min_counts, FrequentPretokens(0, 0, 0))
    all_counts = []
    common: list[tuple[bytes, int]] = []
    longest: list[tuple[bytes, int]] = []
    for table in read_partitions(path):
        counts, lengths = table["count"].to_numpy(), pc.binary_length(table["pretoken"])
        byte_sums = np.cumsum(lengths.to_numpy(), dtype=np.int64)
        count_sums = np.cumsum(counts)
        for min_count in kept:
            if rows := int(np.searchsorted(-counts, -min_count, "right")):  # the counts descend
                added = (rows, int(byte_sums[rows - 1]), int(count_sums[rows - 1]))
                kept[min_count] = FrequentPretokens(*map(sum, zip(kept[min_count], added, strict=True)))
        all_counts.append(counts)
        rows_of_longest = pc.top_k_unstable(lengths, min(num_longest, len(table)))
        for found, part in ((common, table[:num_common]), (longest, table.take(rows_of_longest))):
            found += zip(*part.to_pydict().values(), strict=True)
    descending = -np.sort(-np.concatenate(all_counts))
    ranks = np.unique(np.geomspace(1, max(1, len(descending)), 400).astype(np.int64))[: len(descending)]
    common.sort(key=lambda row: (-row[1], row[0]))
    longest.sort(key=lambda row: (-len(row[0]), row[0]))
    return CountsSummary(kept, common[:num_common], longest[:num_longest], (ranks, descending[ranks - 1]))


def counts_to_arrays(table: pa.Table) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return a table of n counts as read-only arrays: concatenated pretokens, ends of the pretokens (n + 1, from 0),
    counts (n)."""
    pretokens = pa.concat_arrays(table["pretoken"].chunks) if len(table) else pa.array([], pa.binary())
    _, ends, data = pretokens.buffers()
    ends = np.frombuffer(ends, np.int32)[pretokens.offset : pretokens.offset + len(pretokens) + 1]
    joined = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    arrays = joined, ends, table["count"].to_numpy()
    for array in arrays:
        array.flags.writeable = False  # otherwise numba compiles the kernels for writable and read-only arrays
    return arrays


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file of pretoken counts: {error}") from None
    if not file.schema_arrow.equals(SCHEMA) or file.num_row_groups != NUM_PARTITIONS:
        raise UserError(f"{path} is not a Parquet file of pretoken counts: its columns are {file.schema_arrow.names}.")
    return file


def _read(path: Path, file: pq.ParquetFile, partition: int) -> pa.Table:
    try:
        table = file.read_row_group(partition)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    least, most = pc.min_max(table["count"]).as_py().values()
    if any(column.null_count for column in table.columns) or (len(table) and not 1 <= least <= most <= _MAX_COUNT):
        raise UserError(f"{path} is not a Parquet file of pretoken counts: not all rows have a pretoken and its count.")
    return table
