"""Encoding buffers of text to token ids, with the pretokens that came before remembered.

The reference is :meth:`lm.tokenizer.Tokenizer.encode_reference`.
"""

import numpy as np

from lm.kernels import Bytes, Ids, Int, Longs, Word, Words, inlined, kernel
from lm.kernels.apply_merges import Model, Queue, encode_30, encode_62, encode_long
from lm.kernels.simd import load64, read, stand_alone, store64
from lm.kernels.table import (
    ARENA_USED,
    BATCH,
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
from lm.kernels.walk import AT, MORE, SPECIAL_AT, TOO_SMALL, Specials, next_pretokens

REMEMBERED = 1024  # bytes: longer pretokens are encoded anew each time


@inlined
def remember(
    table: Table, slot: int, low: Word, high: Word, buffer: Bytes, at: int, n: int, out: Ids, out_at: int, count: int
) -> None:
    """Enter the pretoken and its ids, just written to ``out``, at an empty slot; empty the table when it is full."""
    size = np.int64(out.itemsize)
    slots, arena, used = table
    in_word = count * size <= 8
    wanted = (0 if n <= SHORT else (n + 7) & ~7) + (0 if in_word and n <= SHORT else (count * size + 7) & ~7)
    if (used[SLOTS_USED] + 1) * 8 > len(slots) // WORDS * 5 or used[ARENA_USED] + wanted + 16 > len(arena):
        slots[:] = 0
        used[SLOTS_USED], used[ARENA_USED] = 0, 8
        return
    offset = used[ARENA_USED]
    if wanted == 0:
        offset = 0
    used[ARENA_USED] += wanted
    used[SLOTS_USED] += 1
    slots[slot] = low
    slots[slot + 1] = high
    slots[slot + 2] = load64(out, out_at)
    slots[slot + 3] = np.uint64(offset) << np.uint64(24) | np.uint64(count)
    if n > SHORT:
        for k in range(n):
            arena[offset + k] = buffer[at + k]
        offset += (n + 7) & ~7
    if wanted:
        step = 8 // size
        for k in range(0, count, step):
            store64(arena, offset + k * size, load64(out, out_at + k))


@inlined
def recall(arena: Bytes, info: Word, skipped: int, out: Ids, out_at: int) -> Int:
    """Copy ids from the arena, ``skipped`` bytes after the offset in ``info``; returns their number."""
    count = np.int64(info & np.uint64(0xFFFFFF))
    offset = np.int64(info >> np.uint64(24)) + skipped
    k = 0
    while k < count:
        store64(out, out_at + k, load64(arena, offset + k * out.itemsize))
        k += 8 // out.itemsize
    return count


@inlined
def encode_other(
    buffer: Bytes,
    at: int,
    n: int,
    key: tuple[Word, Word, int],
    model: Model,
    queue: Queue,
    table: Table,
    work: Workspace,
    out: Ids,
    out_at: int,
) -> int:
    """Encode a pretoken that :func:`copy_known` leaves; ``key`` is with its home. Returns the number of ids."""
    if n > REMEMBERED:
        return encode_long(buffer, at, n, model, queue, work, out, out_at)
    low, high, home = key
    slot = find(table, low, high, home, buffer, at, n)
    if table.slots[slot + 1] != 0:
        return recall(table.arena, table.slots[slot + 3], 0 if n <= SHORT else (n + 7) & ~7, out, out_at)
    arrays = model.byte_pairs, model.pairs, model.parts, model.ids, work.nodes, work.ranks
    if n <= 30:
        count = encode_30(buffer, at, n, *arrays, out, out_at)
    elif n <= 62:
        count = encode_62(buffer, at, n, *arrays, out, out_at)
    else:
        count = encode_long(buffer, at, n, model, queue, work, out, out_at)
    remember(table, slot, low, high, buffer, at, n, out, out_at, count)
    return count


@kernel
def copy_known(
    slots: Words, lows: Words, highs: Words, homes: Longs, i: Int, number: int, out: Ids, out_at: Int
) -> tuple[Int, Int]:
    """Copy the ids of the pretokens from ``i`` to ``number``, up to one that is new, long, or of more ids than its slot
    holds, to ``out[out_at:]``; returns (that pretoken's number, where the ids end)."""
    stand_alone()
    in_word = np.uint64(8 // out.itemsize)
    while i < number:
        low, high = read(lows, i), read(highs, i)
        slot = probe(slots, low, high, read(homes, i))
        info = read(slots, slot + 3)
        if high >= LONG or read(slots, slot + 1) == 0 or info > in_word:
            break
        store64(out, out_at, read(slots, slot + 2))
        out_at += np.int64(info)
        i += 1
    return i, out_at


@kernel
def encode(
    buffer: Bytes,
    end: int,
    final: bool,
    cursor: Longs,
    classes: Bytes,
    specials: Specials,
    model: Model,
    queue: Queue,
    table: Table,
    most_slots: int,
    work: Workspace,
    out: Ids,
) -> tuple[Int, Int]:
    """Encode ``buffer[cursor[AT]:end]``, as far as it is certain, to ``out`` (uint16 or uint32, room for one id a byte
    and 8 more) and move the cursor there.

    Returns (the number of ids, a status): TOO_SMALL or NO_SLOTS where ``work`` or the table must grow to go on, the
    table to ``most_slots`` at most; or below these -4 - i where byte i is not UTF-8.
    """
    starts, lows, highs, homes = work.starts, work.lows, work.highs, work.homes
    out_at = np.int64(0)
    more = True
    while more:
        begin = cursor[AT]
        found, which = next_pretokens(buffer, cursor, end, final, classes, specials, starts)
        if found < 0:
            return out_at, found if found == TOO_SMALL else found - 2
        if 2 * (table.used[SLOTS_USED] + found) > len(table.slots) // WORDS and len(table.slots) < most_slots * WORDS:
            cursor[AT], cursor[SPECIAL_AT] = begin, -1
            return out_at, NO_SLOTS
        for first in range(0, found, BATCH):
            batch = min(BATCH, found - first)
            ask_for(buffer, starts, first, batch, table.slots, lows, highs, homes)
            i = np.int64(0)
            while i < batch:
                i, out_at = copy_known(table.slots, lows, highs, homes, i, batch, out, out_at)
                if i < batch:
                    at = np.int64(starts[first + i])
                    n = np.int64(starts[first + i + 1]) - at
                    key = read(lows, i), read(highs, i), read(homes, i)
                    out_at += encode_other(buffer, at, n, key, model, queue, table, work, out, out_at)
                    i += 1
        if which >= 0:
            out[out_at] = specials.ids[which]
            out_at += 1
        more = which != MORE
    return out_at, 0
