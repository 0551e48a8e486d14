"""Encoding one pretoken: its merges, in the order of their ranks.

The reference is :meth:`lm.tokenizer.Tokenizer.encode_reference`.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.kernels import Bytes, Ids, Int, Ints, Word, Words, inlined, kernel
from lm.kernels.simd import first_bit, last_bit, read, stand_alone, write
from lm.kernels.table import Workspace

MAX_MERGES = (1 << 20) - 256
_BLOCK, _BACK = 2048, 32  # bytes that are merged at once of a longer pretoken, and of those before them, at least
_NO_RANK = np.int32((1 << 25) - 1)  # greater than any
_NO_NODE = np.int32((1 << 22) - 1)  # no merge has it
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_EMPTY = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


class Model(NamedTuple):
    """A vocabulary and its merges for the kernels. Nodes are the bytes and, from 256 on, the merges by rank."""

    ids: npt.NDArray[np.uint32]  # (nodes,): token ids
    lengths: npt.NDArray[np.int32]  # (nodes,): in bytes
    id_lengths: npt.NDArray[np.int32]  # (token ids,): the same by token id
    byte_pairs: npt.NDArray[np.int32]  # (65,536,): rank of the merge of two bytes
    pairs: npt.NDArray[np.uint32]  # hash table: tag << 20 | rank
    parts: npt.NDArray[np.uint64]  # (merges,): left node << 22 | right node


def make_model(ids: Ids, lengths: Ints, id_lengths: Ints, parts: Ints) -> Model:
    """A model; ``parts`` (merges, 2): the nodes that each merge joins. The other arrays are as in the model."""
    merges = len(parts)
    model = Model(
        ids,
        lengths,
        id_lengths,
        np.full(1 << 16, _NO_RANK, np.int32),
        np.full(1 << (2 * merges).bit_length(), _EMPTY, np.uint32),
        np.empty(merges, np.uint64),
    )
    fill_pairs(parts, model)
    return model


class Queue(NamedTuple):
    """For each rank the places where that merge can be made, as a linked list; all empty between two pretokens."""

    heads: npt.NDArray[np.int32]  # (merges,)
    tails: npt.NDArray[np.int32]  # (merges,)
    bits: npt.NDArray[np.uint64]  # which lists hold something
    summary: npt.NDArray[np.uint64]  # which words of ``bits`` are not 0


def make_queue(merges: int) -> Queue:
    """A queue for ``merges`` ranks."""
    words = merges // 64 + 1
    return Queue(
        np.full(merges, -1, np.int32),
        np.full(merges, -1, np.int32),
        np.zeros(words, np.uint64),
        np.zeros(words // 64 + 1, np.uint64),
    )


@inlined
def pair_home(left: int, right: int, size: int) -> tuple[Int, Word]:
    """Where a pair is looked for first in a table of ``size`` entries, and its tag there."""
    mixed = (np.uint64(left) << np.uint64(22) | np.uint64(right)) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(size - 1)), mixed >> np.uint64(52) << np.uint64(20)


@kernel
def fill_pairs(parts: Ints, model: Model) -> None:
    """Enter the merges into ``byte_pairs``, ``pairs`` and ``parts``, which hold none yet."""
    pairs = model.pairs
    for rank in range(len(parts)):
        left, right = np.int64(parts[rank, 0]), np.int64(parts[rank, 1])
        if left < 256 and right < 256:
            model.byte_pairs[left << 8 | right] = rank
        model.parts[rank] = np.uint64(left) << np.uint64(22) | np.uint64(right)
        place, tag = pair_home(left, right, len(pairs))
        while pairs[place] != _EMPTY:
            place = (place + 1) & (len(pairs) - 1)
        pairs[place] = tag | np.uint64(rank)


@inlined
def rank_of(pairs: Ids, parts: Words, left: int, right: int) -> Int:
    """The rank of the merge of two nodes; _NO_RANK where there is none."""
    wanted = np.uint64(left) << np.uint64(22) | np.uint64(right)
    place, tag = pair_home(left, right, len(pairs))
    while True:
        entry = np.uint64(read(pairs, place))
        if entry == _EMPTY:
            return _NO_RANK
        rank = np.int64(entry ^ tag)
        if rank < 1 << 20 and read(parts, rank) == wanted:
            return np.int32(rank)
        place = (place + 1) & (len(pairs) - 1)


def short_encoder(places: int) -> Any:
    """A kernel that encodes a pretoken of at most ``places`` (32 or 64) - 2 bytes to ``out[out_at:]`` and returns the
    number of ids.

    Byte i is place i + 1, between two nodes that merge with nothing. A merge leaves its node at the left place; which
    places are left is a mask. The key of a place is the rank of the merge with the next one, and below it the place: so
    the least of all is the merge to make. All of them are compared and written each time, by vector instructions: to
    look at fewer takes branches that the processor cannot foretell, and costs more.
    """
    bits = places.bit_length() - 1
    no_key = np.int32(_NO_RANK << bits)  # at most any key of no merge, and above those of merges

    @kernel
    def encode_short(
        buffer: Bytes,
        at: int,
        n: int,
        byte_pairs: Ints,
        pairs: Ids,
        parts: Words,
        ids: Ids,
        nodes: Ints,
        keys: Ints,
        out: Ids,
        out_at: int,
    ) -> int:
        stand_alone()
        for i in range(places):
            write(keys, i, no_key)
        write(nodes, 0, _NO_NODE)
        write(nodes, n + 1, _NO_NODE)
        for i in range(n):
            write(nodes, i + 1, np.int32(read(buffer, at + i)))
        best = no_key
        for i in range(n - 1):
            rank = read(byte_pairs, np.int64(read(buffer, at + i)) << 8 | np.int64(read(buffer, at + i + 1)))
            key = np.int32(rank << bits | (i + 1))
            write(keys, i + 1, key)
            best = min(best, key)
        left = _ALL >> np.uint64(62 - n)
        while best < no_key:
            place = np.int64(best & (places - 1))
            node = 256 + np.int64(best >> bits)
            write(nodes, place, np.int32(node))
            above = left & (_ALL << np.uint64(place + 1))
            gone = first_bit(above)
            after = first_bit(above & (above - _ONE))
            left ^= _ONE << np.uint64(gone)
            before = last_bit(left & ((_ONE << np.uint64(place)) - _ONE))
            key_here = np.int32(rank_of(pairs, parts, node, np.int64(read(nodes, after))) << bits | place)
            key_before = np.int32(rank_of(pairs, parts, np.int64(read(nodes, before)), node) << bits | before)
            best = no_key
            for i in range(places):
                key = read(keys, i)
                key = no_key if i == gone else key
                key = key_here if i == place else key
                key = key_before if i == before else key
                write(keys, i, key)
                best = min(best, key)
        count = 0
        left &= left - _ONE
        while left & (left - _ONE):
            write(out, out_at + count, out.dtype.type(read(ids, np.int64(read(nodes, first_bit(left))))))
            count += 1
            left &= left - _ONE
        return count

    return encode_short


encode_30, encode_62 = short_encoder(32), short_encoder(64)


@inlined
def push(queue: Queue, following: Ints, previous: Ints, ranks: Ints, place: int, rank: int) -> None:
    """Put the merge at a place, if there is one, at the end of its rank's list."""
    ranks[place] = rank
    if rank == _NO_RANK:
        return
    tail = read(queue.tails, np.int64(rank))
    previous[place] = tail
    following[place] = -1
    if tail < 0:
        queue.heads[rank] = place
        word = rank >> 6
        queue.bits[word] |= _ONE << np.uint64(rank & 63)
        queue.summary[word >> 6] |= _ONE << np.uint64(word & 63)
    else:
        following[tail] = place
    queue.tails[rank] = place


@inlined
def remove(queue: Queue, following: Ints, previous: Ints, ranks: Ints, place: int) -> None:
    """Take the merge at a place, if there is one, out of its rank's list."""
    rank = read(ranks, place)
    if rank == _NO_RANK:
        return
    before, after = read(previous, place), read(following, place)
    if before >= 0:
        following[before] = after
    else:
        queue.heads[rank] = after
    if after >= 0:
        previous[after] = before
    else:
        queue.tails[rank] = before
    if before < 0 and after < 0:
        word = rank >> 6
        queue.bits[word] &= ~(_ONE << np.uint64(rank & 63))
        if queue.bits[word] == 0:
            queue.summary[word >> 6] &= ~(_ONE << np.uint64(word & 63))


@kernel
def merge_block(buffer: Bytes, at: int, n: int, model: Model, queue: Queue, work: Workspace) -> None:
    """Merge ``n`` bytes; ``work.nodes`` then has a node at the first and at the last byte of its span. Linear in ``n``.

    Merges are made rank by rank: a merge only gives rise to merges of later ranks (the tokenizer has checked that its
    parts are made by earlier ones), so that the lists by rank are emptied in order, and each is in the order of the
    text.
    """
    nodes, ranks, following, previous = work.nodes, work.ranks, work.following, work.previous
    for i in range(n):
        nodes[i] = buffer[at + i]
    for i in range(n - 1):
        rank = read(model.byte_pairs, np.int64(read(buffer, at + i)) << 8 | np.int64(read(buffer, at + i + 1)))
        push(queue, following, previous, ranks, i, rank)
    ranks[n - 1] = _NO_RANK
    group = 0
    while group < len(queue.summary):
        if queue.summary[group] == 0:
            group += 1
            continue
        word = group << 6 | first_bit(queue.summary[group])
        rank = word << 6 | first_bit(queue.bits[word])
        merged = 256 + rank
        length = model.lengths[merged]
        while queue.heads[rank] >= 0:
            place = np.int64(read(queue.heads, rank))
            remove(queue, following, previous, ranks, place)
            remove(queue, following, previous, ranks, place + read(model.lengths, np.int64(read(nodes, place))))
            nodes[place] = nodes[place + length - 1] = merged
            if place > 0:
                left = read(nodes, place - 1)
                before = place - read(model.lengths, np.int64(left))
                remove(queue, following, previous, ranks, before)
                push(queue, following, previous, ranks, before, rank_of(model.pairs, model.parts, left, merged))
            after = place + length
            ranks[place] = _NO_RANK
            if after < n:
                push(
                    queue,
                    following,
                    previous,
                    ranks,
                    place,
                    rank_of(model.pairs, model.parts, merged, read(nodes, after)),
                )


@kernel
def encode_long(
    buffer: Bytes, at: int, n: int, model: Model, queue: Queue, work: Workspace, out: Ids, out_at: int
) -> int:
    """Encode a pretoken of any length to ``out[out_at:]``; returns the number of ids.

    It is done in blocks that stay in the processor's cache. Tokens are those of the whole where each two neighbours
    are what their own bytes are encoded to: the first merge across a boundary would be made there as well. So each
    block begins with the last tokens before it, more of them until the boundary to what is kept is such a one.
    """
    nodes, lengths, id_lengths = work.nodes, model.lengths, model.id_lengths
    number = end = 0
    while end < n:
        start, stop, back = end, min(n, end + _BLOCK), _BACK
        while True:
            while number > 0 and end - start < back:
                number -= 1
                start -= id_lengths[out[out_at + number]]
            merge_block(buffer, at + start, stop - start, model, queue, work)
            count = place = 0
            while place < stop - start:
                out[out_at + number + count] = model.ids[nodes[place]]
                count += 1
                place += lengths[nodes[place]]
            if number == 0:
                break
            left, right = id_lengths[out[out_at + number - 1]], id_lengths[out[out_at + number]]
            merge_block(buffer, at + start - left, left + right, model, queue, work)
            if lengths[nodes[0]] == left and lengths[nodes[left]] == right:
                break
            back *= 4
        number += count
        end = stop
    return number
