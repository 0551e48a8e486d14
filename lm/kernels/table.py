"""A hash table of pretokens: open addressing, four 64-bit words a slot, exact.

A pretoken of at most 15 bytes is its own key: its bytes padded with zeros, its length in the top byte. A longer one
has a hash there, and its bytes in the arena. The third word is the value; the fourth an offset into the arena above
a number below, as the user of the table likes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.kernels import Bytes, Int, Ints, Longs, Word, Words, inlined, kernel
from lm.kernels.simd import first_bit, load64, prefetch, read

SHORT = 15
NO_SLOTS = -3  # the table must have more slots to go on: a status next to walk.TOO_SMALL
WORDS = 4  # of a slot
SLOTS_USED, ARENA_USED, BYTES_USED = 0, 1, 2
BATCH = 128  # pretokens whose slots are asked for before the first is looked at
LONG = np.uint64(0xFF << 56)
_MIX1 = np.uint64(0x9E3779B97F4A7C15)
_MIX2 = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.array([(1 << 8 * min(n, 8)) - 1 for n in range(16)], np.uint64)
_HIGH = np.array([(1 << 8 * max(0, n - 8)) - 1 for n in range(16)], np.uint64)


class Table(NamedTuple):
    """The arrays of a table; ``used`` holds the numbers of used slots, of used arena bytes and of
    bytes of all pretokens."""

    slots: npt.NDArray[np.uint64]  # (a power of two × WORDS,)
    arena: npt.NDArray[np.uint8]
    used: npt.NDArray[np.int64]  # (3,)


def make_table(slots: int, arena: int) -> Table:
    """An empty table of ``slots`` slots, a power of two from 2 on, and an arena of ``arena`` bytes."""
    return Table(_make_slots(slots), np.zeros(arena + 16, np.uint8), np.array([0, 8, 0], np.int64))


def _make_slots(slots: int) -> Words:
    """Empty slots, none of which lies across two cache lines of 64 bytes."""
    words = np.zeros(slots * WORDS + 8, np.uint64)
    first = -(words.ctypes.data // 8) % 8
    return words[first : first + slots * WORDS]


class Workspace(NamedTuple):
    """What the kernels write to on their way, for pretokens of up to ``len(starts) - 65`` bytes."""

    starts: npt.NDArray[np.int32]
    nodes: npt.NDArray[np.int32]
    ranks: npt.NDArray[np.int32]
    following: npt.NDArray[np.int32]
    previous: npt.NDArray[np.int32]
    lows: npt.NDArray[np.uint64]
    highs: npt.NDArray[np.uint64]
    homes: npt.NDArray[np.int64]


def make_workspace(longest: int) -> Workspace:
    """A workspace for pretokens of up to ``longest`` bytes; memory is taken only as they come."""
    size = longest + 65
    return Workspace(
        starts=np.empty(size, np.int32),
        nodes=np.empty(size, np.int32),
        ranks=np.empty(size, np.int32),
        following=np.empty(size, np.int32),
        previous=np.empty(size, np.int32),
        lows=np.empty(BATCH, np.uint64),
        highs=np.empty(BATCH, np.uint64),
        homes=np.empty(BATCH, np.int64),
    )


@inlined
def key_of(buffer: Bytes, at: int, n: int) -> tuple[Word, Word]:
    """The two key words of the pretoken of ``n`` bytes at ``at``."""
    if n <= SHORT:
        low = load64(buffer, at) & read(_LOW, n)
        high = load64(buffer, at + 8) & read(_HIGH, n) | np.uint64(n) << np.uint64(56)
        return low, high
    low = np.uint64(n)
    k = 0
    while k + 8 <= n:
        low = (low ^ load64(buffer, at + k)) * _MIX1
        low ^= low >> np.uint64(29)
        k += 8
    rest = load64(buffer, at + n - 8)
    low = (low ^ rest) * _MIX2
    low ^= low >> np.uint64(32)
    return low, LONG | np.uint64(n)


@inlined
def home_of(low: Word, high: Word, slots: Words) -> Int:
    """The index of the first word of the slot where a key is looked for first."""
    mixed = low * _MIX1 + high * _MIX2
    return np.int64(mixed >> np.uint64(64 - first_bit(np.uint64(len(slots) // WORDS)))) * WORDS


@kernel
def ask_for(
    buffer: Bytes, starts: Ints, first: int, number: int, slots: Words, lows: Words, highs: Words, homes: Longs
) -> None:
    """Write the keys and homes of ``number`` pretokens from ``starts[first]`` on, and ask memory for their slots."""
    for i in range(number):
        at = np.int64(read(starts, first + i))
        low, high = key_of(buffer, at, np.int64(read(starts, first + i + 1)) - at)
        home = home_of(low, high, slots)
        prefetch(slots, home)
        lows[i], highs[i], homes[i] = low, high, home


@inlined
def probe(slots: Words, low: Word, high: Word, slot: int) -> int:
    """From its home on, the first slot that has a key or is empty (second word 0)."""
    while True:
        found = read(slots, slot + 1)
        if found == 0 or (found == high and read(slots, slot) == low):
            return slot
        slot = (slot + WORDS) & (len(slots) - 1)


@inlined
def same_bytes(arena: Bytes, offset: int, buffer: Bytes, at: int, n: int) -> bool:
    """Whether the arena holds the pretoken, of 8 bytes or more, at ``offset``."""
    k = 0
    while k + 8 <= n:
        if load64(arena, offset + k) != load64(buffer, at + k):
            return False
        k += 8
    return load64(arena, offset + n - 8) == load64(buffer, at + n - 8)


@inlined
def find(table: Table, low: Word, high: Word, slot: int, buffer: Bytes, at: int, n: int) -> int:
    """As :func:`probe`, also for long pretokens, whose keys may be those of others."""
    while True:
        slot = probe(table.slots, low, high, slot)
        offset = np.int64(table.slots[slot + 3] >> np.uint64(24))
        if n <= SHORT or table.slots[slot + 1] == 0 or same_bytes(table.arena, offset, buffer, at, n):
            return slot
        slot = (slot + WORDS) & (len(table.slots) - 1)


@kernel
def rehash(old: Words, new: Words) -> None:
    """Put the slots of a table into the empty slots of a larger one."""
    for slot in range(0, len(old), WORDS):
        if old[slot + 1] != 0:
            place = home_of(old[slot], old[slot + 1], new)
            while new[place + 1] != 0:
                place = (place + WORDS) & (len(new) - 1)
            for k in range(WORDS):
                new[place + k] = old[slot + k]


def with_more_slots(table: Table, times: int) -> Table:
    """The same table with 2 or 4 times the slots."""
    slots = _make_slots(times * len(table.slots) // WORDS)
    rehash(table.slots, slots)
    return table._replace(slots=slots)
