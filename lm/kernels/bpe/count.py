"""Counting of pretokens in a hash table that the caller enlarges.

The reference is a ``Counter`` of the pretokens from :func:`lm.text.pretokenize.pretokenize`.
"""

import numpy as np

from lm.kernels.bpe.pretoken_table import (
    BATCH_SIZE,
    KEY_HIGH,
    KEY_LOW,
    LONG_KEY,
    SLOT_WORDS,
    VALUE,
    Table,
    Workspace,
    arena_offset,
    copy_bytes,
    insert,
    is_empty,
    prefetch_batch,
    probe,
)
from lm.kernels.bpe.pretokens import NEEDS_MORE_TEXT, NO_SPECIAL, Specials, next_pretokens
from lm.kernels.bpe.scanners.registry import Rules
from lm.kernels.jit import ARENA_FULL, OK, TABLE_FULL, Bytes, Int32s, Int64s, Records, kernel
from lm.kernels.simd import read, store64, write


@kernel
def count_pretokens(
    buffer: Bytes,
    end: int,
    is_final: bool,
    cursor_array: Records,
    classes: Bytes,
    rules: Rules,
    specials: Specials,
    table: Table,
    work: Workspace,
) -> int:
    """Count the pretokens up to ``end`` that later text cannot change, and move the cursor after them; return a status.

    The value of a slot is the count. ``is_final``: no text follows the buffer.
    """
    starts, lows, highs, home_slots = work.starts, work.lows, work.highs, work.home_slots
    cursor, slots, used = cursor_array[0], table.slots, table.used[0]
    special = NO_SPECIAL
    while special != NEEDS_MORE_TEXT:
        begin = cursor.position
        n, special = next_pretokens(buffer, cursor, end, is_final, classes, rules, specials, starts)
        if n < 0:
            return n
        if n == 0:
            continue
        size = read(starts, n) - read(starts, 0)
        is_table_full = 2 * (used.slots + n) > len(slots) // SLOT_WORDS
        if is_table_full or used.arena_bytes + 2 * size + 16 > len(table.arena):
            cursor.position, cursor.special_start = begin, -1  # the next call finds the same pretokens again
            return TABLE_FULL if is_table_full else ARENA_FULL
        for first in range(0, n, BATCH_SIZE):
            batch_size = n - first if n - first < BATCH_SIZE else BATCH_SIZE
            prefetch_batch(buffer, starts, first, batch_size, table, lows, highs, home_slots)
            for i in range(batch_size):
                key = read(lows, i), read(highs, i)
                slot = probe(slots, key, read(home_slots, i))
                if key[1] >= LONG_KEY or is_empty(slots, slot):
                    start = np.int64(read(starts, first + i))
                    slot = insert(table, key, slot, buffer, start, np.int64(read(starts, first + i + 1)) - start)
                write(slots, slot + VALUE, read(slots, slot + VALUE) + np.uint64(1))
    return OK


@kernel
def export_columns(table: Table, data: Bytes, ends: Int32s, counts: Int64s) -> None:
    """Write all pretokens and their counts as Arrow columns.

    ``data`` (pretoken bytes + 16,): the concatenated pretokens; ``ends`` (pretokens + 1,): their ends, after a first
    entry 0; ``counts`` (pretokens,).
    """
    slots, arena = table.slots, table.arena
    row = 0
    end = np.int64(0)
    for slot in range(0, len(slots), SLOT_WORDS):
        if is_empty(slots, slot):
            continue
        low, high = read(slots, slot + KEY_LOW), read(slots, slot + KEY_HIGH)
        if high < LONG_KEY:
            n = np.int64(high >> np.uint64(56))
            store64(data, end, low)
            store64(data, end + 8, high)
        else:
            n = np.int64(high & ~LONG_KEY)
            copy_bytes(arena, arena_offset(slots, slot), data, end, n)
        end += n
        ends[row + 1] = end
        counts[row] = read(slots, slot + VALUE)
        row += 1


@kernel
def assign_partitions(data: Bytes, ends: Int32s, count: int, partitions: Bytes) -> None:
    """Write the partition of each pretoken, below ``count``, to ``partitions``: its FNV-1a hash modulo ``count``."""
    for row in range(len(partitions)):
        hashed = np.uint64(0xCBF29CE484222325)
        for k in range(read(ends, row), read(ends, row + 1)):
            hashed = (hashed ^ np.uint64(read(data, k))) * np.uint64(0x100000001B3)
        partitions[row] = (hashed >> np.uint64(32)) % np.uint64(count)
