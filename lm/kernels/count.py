"""Counting pretokens: into a table that grows as it is told, and out of it as columns.

The reference is a ``Counter`` of what :func:`lm.pretokens.pretokenize` yields.
"""

import numpy as np

from lm.kernels import Bytes, Ints, Longs, Word, kernel
from lm.kernels.simd import read, store64
from lm.kernels.table import (
    ARENA_USED,
    BATCH,
    BYTES_USED,
    LONG,
    NO_SLOTS,
    SHORT,
    SLOTS_USED,
    WORDS,
    Table,
    Workspace,
    ask_for,
    find,
    probe,
)
from lm.kernels.walk import AT, MORE, SPECIAL_AT, Specials, next_pretokens

NO_ARENA = -4  # no room in the table's arena: a status next to walk.TOO_SMALL and NO_SLOTS
_LENGTH = np.uint64((1 << 56) - 1)


@kernel
def count(
    buffer: Bytes,
    end: int,
    final: bool,
    cursor: Longs,
    classes: Bytes,
    specials: Specials,
    table: Table,
    work: Workspace,
) -> int:
    """Count the pretokens of ``buffer[cursor[AT]:end]``, as far as they are certain, and move the cursor there.

    The third word of a slot is the count. Returns 0; or TOO_SMALL, NO_SLOTS or NO_ARENA where that must grow to go on;
    or below these -5 - i where byte i is not UTF-8.
    """
    starts, lows, highs, homes = work.starts, work.lows, work.highs, work.homes
    slots, arena, used = table.slots, table.arena, table.used
    which = 0
    while which != MORE:
        begin = cursor[AT]
        found, which = next_pretokens(buffer, cursor, end, final, classes, specials, starts)
        if found < 0:
            return found if found > -2 else found - 3
        if found == 0:
            continue
        size = starts[found] - starts[0]
        no_slots = 2 * (used[SLOTS_USED] + found) > len(slots) // WORDS
        if no_slots or used[ARENA_USED] + 2 * size + 16 > len(arena):
            cursor[AT], cursor[SPECIAL_AT] = begin, -1
            return NO_SLOTS if no_slots else NO_ARENA
        for first in range(0, found, BATCH):
            batch = min(BATCH, found - first)
            ask_for(buffer, starts, first, batch, slots, lows, highs, homes)
            for i in range(batch):
                low, high, slot = read(lows, i), read(highs, i), read(homes, i)
                slot = probe(slots, low, high, slot)
                is_known = read(slots, slot + 1) != 0
                if high >= LONG or not is_known:
                    at = np.int64(starts[first + i])
                    slot = enter(table, low, high, slot, buffer, at, np.int64(starts[first + i + 1]) - at)
                slots[slot + 2] += np.uint64(1)
    return 0


@kernel
def enter(table: Table, low: Word, high: Word, slot: int, buffer: Bytes, at: int, n: int) -> int:
    """The slot of a pretoken, which is entered where it is new."""
    slots, arena, used = table.slots, table.arena, table.used
    slot = find(table, low, high, slot, buffer, at, n)
    if slots[slot + 1] == 0:
        slots[slot], slots[slot + 1] = low, high
        slots[slot + 3] = np.uint64(used[ARENA_USED]) << np.uint64(24)
        used[SLOTS_USED] += 1
        used[BYTES_USED] += n
        if n > SHORT:
            for k in range(n):
                arena[used[ARENA_USED] + k] = buffer[at + k]
            used[ARENA_USED] += (n + 7) & ~7
    return slot


@kernel
def columns(table: Table, data: Bytes, ends: Ints, counts: Longs) -> None:
    """Write all pretokens, joined, to ``data`` (with 16 bytes to spare), where each ends to ``ends`` (int32; the first
    entry is 0), and their counts (int64)."""
    slots, arena = table.slots, table.arena
    row = 0
    end = np.int64(0)
    for slot in range(0, len(slots), WORDS):
        low, high = slots[slot], slots[slot + 1]
        if high == 0:
            continue
        if high < LONG:
            n = np.int64(high >> np.uint64(56))
            store64(data, end, low)
            store64(data, end + 8, high)
        else:
            n = np.int64(high & _LENGTH)
            offset = np.int64(slots[slot + 3] >> np.uint64(24))
            for k in range(n):
                data[end + k] = arena[offset + k]
        end += n
        ends[row + 1] = end
        counts[row] = slots[slot + 2]
        row += 1


@kernel
def partition(data: Bytes, ends: Ints, number: int, partitions: Bytes) -> None:
    """Write the partition of each pretoken, below ``number``, to ``partitions`` (uint8): FNV-1a of its bytes."""
    for row in range(len(partitions)):
        mixed = np.uint64(0xCBF29CE484222325)
        for k in range(ends[row], ends[row + 1]):
            mixed = (mixed ^ np.uint64(data[k])) * np.uint64(0x100000001B3)
        partitions[row] = (mixed >> np.uint64(32)) % np.uint64(number)
