"""Encoding and counting of segments, in which tokens of several words (superwords) are made from those of words.

A segment is a pretoken, or several words in a row; see :data:`lm.text.patterns.SEGMENT_PATTERNS`. The first merges of a
vocabulary never cross words, so the words of a segment are encoded one by one, with the cache of pretokens. Then the
other merges, the superwords', join tokens of the segment. The references are :mod:`lm.tokenizer.reference` with the
pattern of segments, and ``naive_superwords`` in the tests.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.corpus import ENTRIES_PER_PRETOKEN, Corpus
from lm.kernels.bpe.encode import copy_cached, encode_or_copy
from lm.kernels.bpe.merge import NO_RANK, EncoderState, encode_long, pair_rank
from lm.kernels.bpe.pretoken_table import (
    BATCH_SIZE,
    SLOT_WORDS,
    VALUE,
    Table,
    home_slot,
    insert,
    prefetch_batch,
    pretoken_key,
    read_seeds,
)
from lm.kernels.bpe.pretokens import NEEDS_MORE_TEXT, Specials, next_pretokens
from lm.kernels.bpe.scanners.bit_masks import APOSTROPHE, SPACE, STARTS_PADDING, class_at, class_before
from lm.kernels.bpe.scanners.character_classes import LETTER
from lm.kernels.bpe.scanners.registry import Rules
from lm.kernels.bpe.training_state import Tokens, pair_hash
from lm.kernels.jit import (
    ARENA_FULL,
    OK,
    TABLE_FULL,
    WORKSPACE_FULL,
    Bytes,
    Ids,
    Int,
    Int32s,
    Int64s,
    Records,
    UInt32s,
    helper,
    kernel,
)
from lm.kernels.simd import read, write

_MAX_SHORT_TOKENS = 64  # of a segment; more are merged from the bytes, in a time that is linear in their number
_MAX_BUCKET = 2**32 - 1


class SegmentEncoder(NamedTuple):
    """How the tokens of words become those of a segment."""

    words: EncoderState  # only with merges that do not cross words
    all: EncoderState  # with all merges; shares the workspace of ``words``
    nodes: Int32s  # (token ids,): node of each id in the merges of ``all``
    has_superwords: bool  # else ``all`` is not used


@helper
def is_joined(buffer: Bytes, begin: int, start: int, stop: int, classes: Bytes) -> bool:
    """Return whether the pretoken ``buffer[start:stop]`` is in the segment of the one before it, from ``begin`` on."""
    first = read(buffer, start)
    return (
        first in (SPACE, APOSTROPHE)
        and stop - start > 1
        and class_at(buffer, start + 1, stop, classes) == LETTER
        and class_before(buffer, begin, start, classes) == LETTER
    )


@helper
def merge_superwords(
    encoder: SegmentEncoder, buffer: Bytes, start: int, stop: int, out: Ids, first: int, end: int
) -> Int:
    """Merge the tokens ``out[first:end]`` of the segment ``buffer[start:stop]``; return the new end."""
    merges, work = encoder.all.merges, encoder.words.work
    count = end - first
    if count < 2:
        return end
    if count > _MAX_SHORT_TOKENS:
        return first + encode_long(encoder.all, buffer, start, stop - start, out, first)
    nodes, ranks = work.nodes, work.ranks
    for i in range(count):
        write(nodes, i, read(encoder.nodes, np.int64(read(out, first + i))))
    for i in range(count - 1):
        left, right = np.int64(read(nodes, i)), np.int64(read(nodes, i + 1))
        write(ranks, i, np.int32(pair_rank(merges.pairs, merges.filter, merges.parts, left, right)))
    while True:
        best, place = np.int32(NO_RANK), np.int64(-1)
        for i in range(count - 1):
            rank = read(ranks, i)
            if rank < best:
                best, place = rank, np.int64(i)
        if place < 0:
            break
        merged = 256 + np.int64(best)
        write(nodes, place, np.int32(merged))
        for i in range(place + 1, count - 1):
            write(nodes, i, read(nodes, i + 1))
            write(ranks, i, read(ranks, i + 1))
        count -= 1
        if place > 0:
            left = np.int64(read(nodes, place - 1))
            write(ranks, place - 1, np.int32(pair_rank(merges.pairs, merges.filter, merges.parts, left, merged)))
        if place < count - 1:
            right = np.int64(read(nodes, place + 1))
            write(ranks, place, np.int32(pair_rank(merges.pairs, merges.filter, merges.parts, merged, right)))
    for i in range(count):
        write(out, first + i, out.dtype.type(read(merges.ids, np.int64(read(nodes, i)))))
    return first + count


@kernel
def encode_segments(
    encoder: SegmentEncoder,
    buffer: Bytes,
    end: int,
    is_final: bool,
    cursor_array: Records,
    classes: Bytes,
    rules: Rules,
    specials: Specials,
    max_words: int,
    max_slots: int,
    out: Ids,
    ends: Int32s,
) -> tuple[Int, Int, Int]:
    """Encode the segments up to ``end`` that later text cannot change, and move the cursor after them.

    Returns (number of ids, number of segments, status). ``ends`` (bytes + 8,): the end in ``out`` of each segment or
    special token. ``max_words``: of a segment. For the rest see :func:`lm.kernels.bpe.encode.encode`.
    """
    state = encoder.words
    table, work = state.table, state.work
    starts, lows, highs, home_slots = work.starts, work.lows, work.highs, work.home_slots
    capacity = len(starts) - STARTS_PADDING  # bytes of a segment that the workspace holds
    cursor, slots, used = cursor_array[0], table.slots, table.used[0]
    out_at, segments = np.int64(0), np.int64(0)
    segment_start, segment_out, words = np.int64(cursor.position), np.int64(0), np.int64(0)  # of the open segment
    while True:
        begin = np.int64(cursor.position)
        n, special = next_pretokens(buffer, cursor, end, is_final, classes, rules, specials, starts)
        is_table_full = len(slots) < max_slots * SLOT_WORDS and 2 * (used.slots + n) > len(slots) // SLOT_WORDS
        if n < 0 or is_table_full:
            cursor.position, cursor.special_start = segment_start, -1  # the next call finds the open segment again
            return segment_out, segments, n if n < 0 else TABLE_FULL
        for first in range(0, n, BATCH_SIZE):
            batch_size = n - first if n - first < BATCH_SIZE else BATCH_SIZE
            prefetch_batch(buffer, starts, first, batch_size, table, lows, highs, home_slots)
            for i in range(np.int64(batch_size)):
                start, stop = np.int64(read(starts, first + i)), np.int64(read(starts, first + i + 1))
                is_in_segment = 0 < words < max_words and is_joined(buffer, segment_start, start, stop, classes)
                if words > 0 and not is_in_segment:
                    if encoder.has_superwords:
                        if start - segment_start > capacity:
                            cursor.position, cursor.special_start = segment_start, -1
                            return segment_out, segments, WORKSPACE_FULL
                        out_at = merge_superwords(encoder, buffer, segment_start, start, out, segment_out, out_at)
                    write(ends, segments, np.int32(out_at))
                    segments += 1
                    segment_start, segment_out, words = start, out_at, np.int64(0)
                copied, out_at = copy_cached(slots, lows, highs, home_slots, i, i + 1, out, out_at)
                if copied == i:
                    key = read(lows, i), read(highs, i)
                    out_at += encode_or_copy(state, buffer, start, stop - start, key, read(home_slots, i), out, out_at)
                words += 1
        is_end = special >= 0 or (special == NEEDS_MORE_TEXT and is_final)
        if is_end and words > 0:
            stop = np.int64(read(starts, n)) if n > 0 else begin
            if encoder.has_superwords:
                if stop - segment_start > capacity:
                    cursor.position, cursor.special_start = segment_start, -1
                    return segment_out, segments, WORKSPACE_FULL
                out_at = merge_superwords(encoder, buffer, segment_start, stop, out, segment_out, out_at)
            write(ends, segments, np.int32(out_at))
            segments += 1
            words = np.int64(0)
        if special >= 0:
            out[out_at] = read(specials.ids, special)
            out_at += 1
            write(ends, segments, np.int32(out_at))
            segments += 1
        if is_end:
            segment_start, segment_out = np.int64(cursor.position), out_at
        if special == NEEDS_MORE_TEXT:
            if not is_end:
                cursor.position, cursor.special_start = segment_start, -1
                out_at = segment_out
            return out_at, segments, OK


@helper
def add_to_bucket(buckets: UInt32s, left: Int, right: Int) -> None:
    """Add one to the bucket of a pair, up to the largest number."""
    bucket = pair_hash(left, right) & (len(buckets) - 1)
    count = np.int64(read(buckets, bucket))
    if count < _MAX_BUCKET:
        write(buckets, bucket, np.uint32(count + 1))


@kernel
def add_pairs(ids: Ids, ends: Int32s, segments: int, buckets: UInt32s) -> None:
    """Add each pair of neighbors in a segment to its bucket. The sum of a bucket is at least the count of each pair."""
    start = np.int64(0)
    for segment in range(segments):
        end = np.int64(read(ends, segment))
        for i in range(start, end - 1):
            add_to_bucket(buckets, np.int64(read(ids, i)), np.int64(read(ids, i + 1)))
        start = end


@kernel
def count_pieces(
    ids: Ids, data: Bytes, ends: Int32s, segments: int, segment: Int, buckets: UInt32s, threshold: int, table: Table
) -> tuple[Int, Int]:
    """Count the pieces of two or more tokens, from a segment on; return (segment, status), where to continue.

    Segments are cut between neighbors whose bucket has less than ``threshold``. ``data``: the bytes of ``ids``, which
    are the keys of the table.
    """
    used, size, seeds = table.used[0], np.int64(ids.itemsize), read_seeds(table)
    while segment < segments:
        start, end = np.int64(read(ends, segment - 1) if segment > 0 else 0), np.int64(read(ends, segment))
        if 2 * (used.slots + end - start) > len(table.slots) // SLOT_WORDS:
            return segment, TABLE_FULL
        if used.arena_bytes + (size + 8) * (end - start) + 16 > len(table.arena):
            return segment, ARENA_FULL
        for i in range(start, end):
            is_joined_to_next = bool(i + 1 < end)
            if is_joined_to_next:
                bucket = pair_hash(np.int64(read(ids, i)), np.int64(read(ids, i + 1))) & (len(buckets) - 1)
                is_joined_to_next = bool(read(buckets, bucket) >= threshold)
            if not is_joined_to_next:
                if i > start:
                    begin, n = start * size, (i + 1 - start) * size
                    key = pretoken_key(data, begin, n, seeds)
                    slot = insert(table, key, home_slot(key, table.slots, seeds), data, begin, n)
                    write(table.slots, slot + VALUE, read(table.slots, slot + VALUE) + np.uint64(1))
                start = np.int64(i + 1)
        segment += 1
    return segment, OK


@kernel
def copy_tokens(ids: Ids, token_data: Bytes, token_ends: Int64s, data: Bytes) -> None:
    """Write the bytes of the tokens ``ids``, one after the other. ``token_ends`` has a first entry 0."""
    at = np.int64(0)
    for i in range(len(ids)):
        token = np.int64(read(ids, i))
        for k in range(read(token_ends, token), read(token_ends, token + 1)):
            write(data, at, read(token_data, k))
            at += 1


@kernel
def set_tokens(corpus: Corpus, tokens: Tokens, ids: Ids, ends: Int64s, position: Int) -> Int:
    """Put tokens in place of the bytes of pretokens that :func:`lm.kernels.bpe.corpus.fill_corpus` has written.

    ``ids``: the tokens of all pretokens, which end at ``ends`` after a first entry 0. Returns the next position.
    """
    inside = np.int64(read(corpus.ids, 0)) + 1
    for row in range(len(ends) - 1):
        for i in range(read(ends, row), read(ends, row + 1)):
            token = np.int64(read(ids, i))
            length = np.int64(read(tokens.lengths, token))
            for k in range(1, length - 1):
                write(corpus.ids, position + k, corpus.ids.dtype.type(inside))
            write(corpus.ids, position, corpus.ids.dtype.type(token))
            write(corpus.ids, position + length - 1, corpus.ids.dtype.type(token))
            write(tokens.places, token, np.uint32(position))
            position += length
        position += ENTRIES_PER_PRETOKEN
    return position
