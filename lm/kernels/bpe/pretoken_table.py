"""Hash table of pretokens: open addressing, linear probing, exact comparison.

``slots`` is a flat uint64 array. A slot is four words, half a cache line; in code, ``slot`` is the index of its first:

    word            pretoken of at most 15 bytes             longer pretoken
    ──────────────────────────────────────────────────────────────────────────────────
    0  key, low     bytes 0–7, zero-padded                   hash of the bytes
    1  key, high    length << 56 | bytes 8–14                0xFF << 56 | length
    2  value        when counting: the number of occurrences
                    when encoding: the first 8 bytes of the token ids; in a table of tokens: the id
    3  info         arena offset << 24 | number of token ids (0 when counting and in a table of tokens)

Word 1 is 0 in an empty slot. At its offset, the arena holds the bytes of a longer pretoken, then the token ids if they
do not fit into the value or the pretoken is longer; each part is padded to 8 bytes.

The hash has random seeds in each process: with known ones, a text could be made whose pretokens share a home slot.
"""

import os
from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import STARTS_PADDING
from lm.kernels.jit import Bytes, Int, Int32s, Int64s, Records, UInt64s, Word, helper, inlined, kernel
from lm.kernels.simd import first_bit, fold_product, load64, prefetch, read, write

SHORT_BYTES = 15  # longest pretoken that is its own key
SLOT_WORDS = 4
BATCH_SIZE = 128  # pretokens whose slots are prefetched before the first is read
LONG_KEY = np.uint64(0xFF << 56)  # ``high`` of a longer pretoken is at least this
KEY_LOW, KEY_HIGH, VALUE, INFO = range(SLOT_WORDS)
_OFFSET_BITS = np.uint64(24)
_COUNT_MASK = np.uint64((1 << 24) - 1)
_SEEDS = np.frombuffer(os.urandom(16), np.uint64).copy()  # passed in tables: a constant would be in the compiled code
_LOW_MASKS = np.array([(1 << 8 * min(n, 8)) - 1 for n in range(16)], np.uint64)  # by length
_HIGH_MASKS = np.array([(1 << 8 * max(0, n - 8)) - 1 for n in range(16)], np.uint64)

_USED = np.dtype([(name, np.int64) for name in ("slots", "arena_bytes", "pretoken_bytes")])
ARENA_START = 8  # offset 0 means no place in the arena
Key = tuple[Word, Word]  # (low, high)
Seeds = tuple[Word, Word]


class Table(NamedTuple):
    """The arrays of a table."""

    slots: UInt64s  # (a power of two × SLOT_WORDS,)
    arena: Bytes
    used: Records  # (1,): used slots, used bytes of the arena, bytes of all pretokens
    seeds: UInt64s  # (2,): of the hash


def make_table(slots: int, arena_bytes: int) -> Table:
    """Return an empty table; ``slots`` is a power of two, at least 2."""
    used = np.array([(0, ARENA_START, 0)], _USED)
    return Table(_make_slots(slots), np.zeros(arena_bytes + 16, np.uint8), used, _SEEDS)


def _make_slots(slots: int) -> UInt64s:
    """Return empty slots, aligned so that no slot crosses a cache line of 64 bytes."""
    words = np.zeros(slots * SLOT_WORDS + 8, np.uint64)
    first = -(words.ctypes.data // 8) % 8
    return words[first : first + slots * SLOT_WORDS]


class Workspace(NamedTuple):
    """Scratch arrays for pretokens of up to ``len(starts) - STARTS_PADDING`` bytes; the last three are per batch."""

    starts: Int32s
    nodes: Int32s
    ranks: Int32s
    following: Int32s
    previous: Int32s
    lows: UInt64s
    highs: UInt64s
    home_slots: Int64s


def make_workspace(max_bytes: int) -> Workspace:
    """Return a workspace for pretokens of up to ``max_bytes``; the OS gives memory only to the pages in use."""
    starts, nodes, ranks, following, previous = (np.empty(max_bytes + STARTS_PADDING, np.int32) for _ in range(5))
    lows, highs = (np.empty(BATCH_SIZE, np.uint64) for _ in range(2))
    home_slots = np.empty(BATCH_SIZE, np.int64)
    return Workspace(starts, nodes, ranks, following, previous, lows, highs, home_slots)


@inlined
def is_empty(slots: UInt64s, slot: int) -> bool:
    """Return whether a slot holds no pretoken."""
    return read(slots, slot + KEY_HIGH) == 0


@inlined
def arena_offset(slots: UInt64s, slot: int) -> Int:
    """Return where the bytes and ids of a slot's pretoken are in the arena."""
    return np.int64(read(slots, slot + INFO) >> _OFFSET_BITS)


@inlined
def id_count(slots: UInt64s, slot: int) -> Int:
    """Return the number of token ids of a slot's pretoken."""
    return np.int64(read(slots, slot + INFO) & _COUNT_MASK)


@inlined
def set_slot(slots: UInt64s, slot: int, key: Key, value: Word, offset: int, ids: int) -> None:
    """Fill an empty slot; ``offset`` is in the arena, ``ids`` the number of token ids."""
    low, high = key
    write(slots, slot + KEY_LOW, low)
    write(slots, slot + KEY_HIGH, high)
    write(slots, slot + VALUE, value)
    write(slots, slot + INFO, np.uint64(offset) << _OFFSET_BITS | np.uint64(ids))


@inlined
def padded_bytes(n: int) -> int:
    """Return ``n`` rounded up to a multiple of 8."""
    return (n + 7) & ~7


@inlined
def read_seeds(table: Table) -> Seeds:
    """Return the seeds of a table. They are equal for all tables of a process, so one key serves several tables."""
    return read(table.seeds, 0), read(table.seeds, 1)


@inlined
def pretoken_key(buffer: Bytes, start: int, n: int, seeds: Seeds) -> Key:
    """Return the key of the pretoken of ``n`` bytes at ``start``."""
    if n <= SHORT_BYTES:
        low = load64(buffer, start) & read(_LOW_MASKS, n)
        high = load64(buffer, start + 8) & read(_HIGH_MASKS, n) | np.uint64(n) << np.uint64(56)
        return low, high
    low, multiplier = seeds
    k = 0
    while k + 8 <= n:
        low = fold_product(low ^ load64(buffer, start + k), multiplier)
        k += 8
    low = fold_product(low ^ load64(buffer, start + n - 8), multiplier)
    return low, LONG_KEY | np.uint64(n)


@inlined
def home_slot(key: Key, slots: UInt64s, seeds: Seeds) -> Int:
    """Return the slot where the search for a key starts."""
    mixed = fold_product(key[0] ^ seeds[0], key[1] ^ seeds[1])
    return np.int64(mixed >> np.uint64(64 - first_bit(np.uint64(len(slots) // SLOT_WORDS)))) * SLOT_WORDS


@helper
def prefetch_batch(
    buffer: Bytes,
    starts: Int32s,
    first: int,
    size: int,
    table: Table,
    lows: UInt64s,
    highs: UInt64s,
    home_slots: Int64s,
) -> None:
    """Write the keys and home slots of ``size`` pretokens from ``starts[first]``, and prefetch the slots."""
    slots, seeds = table.slots, read_seeds(table)
    for i in range(size):
        start = np.int64(read(starts, first + i))
        key = pretoken_key(buffer, start, np.int64(read(starts, first + i + 1)) - start, seeds)
        slot = home_slot(key, slots, seeds)
        prefetch(slots, slot)
        lows[i], highs[i] = key
        home_slots[i] = slot


@inlined
def next_slot(slots: UInt64s, slot: int) -> int:
    """Return the slot after a slot; the first follows the last."""
    return (slot + SLOT_WORDS) & (len(slots) - 1)


@inlined
def probe(slots: UInt64s, key: Key, slot: int) -> int:
    """Return the first slot from ``slot`` on that has this key or is empty."""
    low, high = key
    while True:
        slot_high = read(slots, slot + KEY_HIGH)
        if slot_high == 0 or (slot_high == high and read(slots, slot + KEY_LOW) == low):
            return slot
        slot = next_slot(slots, slot)


@inlined
def has_same_bytes(arena: Bytes, offset: int, buffer: Bytes, start: int, n: int) -> bool:
    """Return whether the ``n`` ≥ 8 bytes at ``arena[offset]`` equal those at ``buffer[start]``."""
    k = 0
    while k + 8 <= n:
        if load64(arena, offset + k) != load64(buffer, start + k):
            return False
        k += 8
    return load64(arena, offset + n - 8) == load64(buffer, start + n - 8)


@inlined
def find_slot(table: Table, key: Key, slot: int, buffer: Bytes, start: int, n: int) -> int:
    """Return the slot of a pretoken, or the empty slot for it: :func:`probe`, and long pretokens compared by bytes."""
    slots = table.slots
    while True:
        slot = probe(slots, key, slot)
        offset = arena_offset(slots, slot)
        if n <= SHORT_BYTES or is_empty(slots, slot) or has_same_bytes(table.arena, offset, buffer, start, n):
            return slot
        slot = next_slot(slots, slot)


@inlined
def copy_bytes(source: Bytes, start: int, target: Bytes, at: int, n: int) -> None:
    """Copy ``n`` bytes from ``source[start]`` to ``target[at]``."""
    for k in range(n):
        write(target, at + k, read(source, start + k))


@helper
def insert(table: Table, key: Key, slot: int, buffer: Bytes, start: int, n: int) -> int:
    """Find or add a pretoken and return its slot. The search begins at ``slot``, which is the hash of ``key``."""
    slots, arena, used = table.slots, table.arena, table.used[0]
    slot = find_slot(table, key, slot, buffer, start, n)
    if is_empty(slots, slot):
        offset = used.arena_bytes
        set_slot(slots, slot, key, np.uint64(0), offset, 0)
        used.slots += 1
        used.pretoken_bytes += n
        if n > SHORT_BYTES:
            copy_bytes(buffer, start, arena, offset, n)
            used.arena_bytes += padded_bytes(n)
    return slot


@inlined
def find_value(table: Table, key: Key, buffer: Bytes, start: int, n: int) -> Int:
    """Return the value of a pretoken; -1 if the table lacks it."""
    if table.used[0].slots == 0:
        return np.int64(-1)
    slot = find_slot(table, key, home_slot(key, table.slots, read_seeds(table)), buffer, start, n)
    return np.int64(-1) if is_empty(table.slots, slot) else np.int64(read(table.slots, slot + VALUE))


def make_token_table(data: Bytes, lengths: Int64s, ids: Int64s) -> Table:
    """Return a table of n tokens: their concatenated bytes, their lengths (n,), not 0, and their ids (n,), which become
    the values."""
    table = make_table(1 << max(1, (2 * len(ids) - 1).bit_length()), int(8 * len(ids) + lengths.sum()))
    if len(ids):
        fill_token_table(table, np.append(data, np.zeros(16, np.uint8)), np.append(0, np.cumsum(lengths)), ids)
    return table


@kernel
def fill_token_table(table: Table, data: Bytes, starts: Int64s, ids: Int64s) -> None:
    """Enter token i, ``data[starts[i]:starts[i + 1]]``, with its id as value. ``data`` has 16 bytes more."""
    seeds = read_seeds(table)
    for i in range(len(ids)):
        start = read(starts, i)
        n = read(starts, i + 1) - start
        key = pretoken_key(data, start, n, seeds)
        slot = insert(table, key, home_slot(key, table.slots, seeds), data, start, n)
        write(table.slots, slot + VALUE, np.uint64(read(ids, i)))


@kernel
def rehash(table: Table, new: UInt64s) -> None:
    """Insert all used slots of a table into ``new``, the empty slots of a larger one."""
    old, seeds = table.slots, read_seeds(table)
    for slot in range(0, len(old), SLOT_WORDS):
        if not is_empty(old, slot):
            target = home_slot((read(old, slot + KEY_LOW), read(old, slot + KEY_HIGH)), new, seeds)
            while not is_empty(new, target):
                target = next_slot(new, target)
            for k in range(SLOT_WORDS):
                write(new, target + k, read(old, slot + k))


def grow_table(table: Table, factor: int) -> Table:
    """Return a new table with the same entries and ``factor`` (2 or 4) times the slots."""
    slots = _make_slots(factor * len(table.slots) // SLOT_WORDS)
    rehash(table, slots)
    return table._replace(slots=slots)


def grow_arena(table: Table, extra_bytes: int) -> Table:
    """Return the same table with twice the arena and ``extra_bytes`` more."""
    arena = np.zeros(2 * len(table.arena) + extra_bytes, np.uint8)
    arena[: len(table.arena)] = table.arena
    return table._replace(arena=arena)
