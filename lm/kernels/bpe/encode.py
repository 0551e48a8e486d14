"""Encoding of buffers of text to token ids, with a cache of the pretokens encoded before.

The reference is :mod:`lm.tokenizer.reference`.
"""

import numpy as np

from lm.kernels.bpe.merge import EncoderState, encode_30, encode_62, encode_long
from lm.kernels.bpe.pretoken_table import (
    ARENA_START,
    BATCH_SIZE,
    INFO,
    LONG_KEY,
    SHORT_BYTES,
    SLOT_WORDS,
    VALUE,
    Key,
    Table,
    arena_offset,
    copy_bytes,
    find_slot,
    find_value,
    home_slot,
    id_count,
    is_empty,
    padded_bytes,
    prefetch_batch,
    probe,
    read_seeds,
    set_slot,
)
from lm.kernels.bpe.pretokens import NEEDS_MORE_TEXT, Specials, next_pretokens
from lm.kernels.bpe.scanners.registry import Rules
from lm.kernels.jit import OK, TABLE_FULL, Bytes, Ids, Int, Int64s, Records, UInt64s, helper, inlined, kernel
from lm.kernels.simd import load64, noinline, prefetch, read, store64, write

MAX_CACHED_BYTES = 1024  # longer pretokens are encoded each time


@inlined
def cache_ids(
    table: Table, slot: int, key: Key, buffer: Bytes, start: int, n: int, out: Ids, out_at: int, count: int
) -> None:
    """Enter a pretoken and its ids ``out[out_at:]`` at an empty slot. If the table is full, clear it instead."""
    slots, arena, used = table.slots, table.arena, table.used[0]
    id_size = np.int64(out.itemsize)
    text_space = 0 if n <= SHORT_BYTES else padded_bytes(n)
    id_space = 0 if count * id_size <= 8 and n <= SHORT_BYTES else padded_bytes(count * id_size)
    space = text_space + id_space
    if (used.slots + 1) * 8 > len(slots) // SLOT_WORDS * 5 or used.arena_bytes + space + 16 > len(arena):
        for k in range(len(slots)):
            write(slots, k, np.uint64(0))
        used.slots, used.arena_bytes = 0, ARENA_START
        return
    offset = used.arena_bytes if space else 0
    used.arena_bytes += space
    used.slots += 1
    set_slot(slots, slot, key, load64(out, out_at), offset, count)
    if n > SHORT_BYTES:
        copy_bytes(buffer, start, arena, offset, n)
        offset += text_space
    if space:
        for k in range(0, count, 8 // id_size):
            store64(arena, offset + k * id_size, load64(out, out_at + k))


@inlined
def encode_or_copy(
    state: EncoderState, buffer: Bytes, start: int, n: int, key: Key, home: int, out: Ids, out_at: int
) -> int:
    """Encode a pretoken at which :func:`copy_cached` stops; return the number of ids."""
    if n > MAX_CACHED_BYTES:
        token = find_value(state.whole_tokens, key, buffer, start, n)
        if token < 0:
            return encode_long(state, buffer, start, n, out, out_at)
        out[out_at] = token
        return 1
    table, merges, work = state.table, state.merges, state.work
    slot = find_slot(table, key, home, buffer, start, n)
    if not is_empty(table.slots, slot):
        count = id_count(table.slots, slot)
        offset = arena_offset(table.slots, slot) + (0 if n <= SHORT_BYTES else padded_bytes(n))
        k = 0
        while k < count:
            store64(out, out_at + k, load64(table.arena, offset + k * out.itemsize))
            k += 8 // out.itemsize
        return count
    arrays = merges.byte_pairs, merges.pairs, merges.filter, merges.parts, merges.ids, work.nodes, work.ranks
    whole = state.whole_tokens
    prefetch(whole.slots, home_slot(key, whole.slots, read_seeds(whole)))  # arrives while the bytes are merged
    if n <= 30:
        count = encode_30(buffer, start, n, arrays, out, out_at)
    elif n <= 62:
        count = encode_62(buffer, start, n, arrays, out, out_at)
    else:
        count = encode_long(state, buffer, start, n, out, out_at)
    token = find_value(whole, key, buffer, start, n)
    if token >= 0:
        count = 1
        out[out_at] = token
    cache_ids(table, slot, key, buffer, start, n, out, out_at, count)
    return count


@helper
def copy_cached(
    slots: UInt64s, lows: UInt64s, highs: UInt64s, home_slots: Int64s, i: Int, batch_size: int, out: Ids, out_at: Int
) -> tuple[Int, Int]:
    """Copy the ids of pretokens ``i`` to ``batch_size`` from the values of their slots to ``out[out_at:]``.

    Stop at a pretoken that is new, long, or has more ids than a value holds. Returns (its number, end of the ids).
    """
    noinline()
    max_ids = np.uint64(8 // out.itemsize)
    while i < batch_size:
        low, high = read(lows, i), read(highs, i)
        slot = probe(slots, (low, high), read(home_slots, i))
        info = read(slots, slot + INFO)  # the number of ids if there is no arena offset, else greater than max_ids
        if high >= LONG_KEY or is_empty(slots, slot) or info > max_ids:
            break
        store64(out, out_at, read(slots, slot + VALUE))
        out_at += np.int64(info)
        i += 1
    return i, out_at


@kernel
def encode(
    state: EncoderState,
    buffer: Bytes,
    end: int,
    is_final: bool,
    cursor_array: Records,
    classes: Bytes,
    rules: Rules,
    specials: Specials,
    max_slots: int,
    out: Ids,
) -> tuple[Int, Int]:
    """Encode the text up to ``end`` that later text cannot change, and move the cursor after it.

    Returns (number of ids, status).

    ``is_final``: no text follows the buffer. ``out`` has one entry per byte and 8 more. TABLE_FULL is returned only
    while the table has fewer than ``max_slots``; a larger table is cleared when it is full.
    """
    table, work = state.table, state.work
    starts, lows, highs, home_slots = work.starts, work.lows, work.highs, work.home_slots
    cursor, slots, used = cursor_array[0], table.slots, table.used[0]
    out_at = np.int64(0)
    is_done = False
    while not is_done:
        begin = cursor.position
        n, special = next_pretokens(buffer, cursor, end, is_final, classes, rules, specials, starts)
        if n < 0:
            return out_at, n
        if len(slots) < max_slots * SLOT_WORDS and 2 * (used.slots + n) > len(slots) // SLOT_WORDS:
            cursor.position, cursor.special_start = begin, -1  # the next call finds the same pretokens again
            return out_at, TABLE_FULL
        for first in range(0, n, BATCH_SIZE):
            batch_size = n - first if n - first < BATCH_SIZE else BATCH_SIZE
            prefetch_batch(buffer, starts, first, batch_size, table, lows, highs, home_slots)
            i = np.int64(0)
            while i < batch_size:
                i, out_at = copy_cached(slots, lows, highs, home_slots, i, batch_size, out, out_at)
                if i < batch_size:
                    start = np.int64(read(starts, first + i))
                    length = np.int64(read(starts, first + i + 1)) - start
                    key = read(lows, i), read(highs, i)
                    out_at += encode_or_copy(state, buffer, start, length, key, read(home_slots, i), out, out_at)
                    i += 1
        if special >= 0:
            out[out_at] = read(specials.ids, special)
            out_at += 1
        is_done = special == NEEDS_MORE_TEXT
    return out_at, OK
