"""The corpus of BPE training: all different pretokens with their counts, in three or five bytes for each byte."""

from typing import NamedTuple

import numpy as np

from lm.kernels.jit import Bytes, Ids, Int, Int32s, Int64s, helper, inlined, kernel
from lm.kernels.simd import equal_in_block, first_bit, read, write

MAX_ENTRIES = 2**32 - 1  # of a corpus; the largest uint32 is no place
FIRST_LARGE_COUNT = 15 << 28  # in a corpus; FIRST_LARGE_COUNT + i stands for entry i of ``large_counts``
ENTRIES_PER_PRETOKEN = 4  # in addition to its bytes
_LONG_BYTES = 1024  # of a pretoken whose end is looked up; the end of a shorter one is searched for in its entries


class Corpus(NamedTuple):
    """Unique pretokens, one entry per byte. Four more entries separate them::

        boundary | pretoken … | boundary | count, low half | count, high half | boundary | pretoken … | boundary | …

    A token of n bytes has n entries, the first and the last with its id; so neighbors need no links. The boundary is an
    id that no token has, and so is ``boundary + 1``, which entries inside a token may have.
    """

    ids: Ids  # (n,), uint16 if the vocabulary permits
    data: Bytes  # (n,): the bytes of the pretokens
    large_counts: Int64s
    long_ends: Int64s  # where the pretokens of more than ``_LONG_BYTES`` end, ascending


def corpus_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the type of the ids in a corpus: two ids follow the vocabulary."""
    return np.dtype(np.uint16 if vocab_size + 1 <= np.iinfo(np.uint16).max else np.uint32)


def make_corpus(num_entries: int, vocab_size: int) -> Corpus:
    """Return an empty corpus. Fill it with :func:`add_pretokens`."""
    ids = np.zeros(num_entries + 64, corpus_dtype(vocab_size))  # the kernels read blocks of 64 bytes
    ids[0] = vocab_size
    return Corpus(ids, np.empty(num_entries, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))


def add_pretokens(corpus: Corpus, position: int, pretokens: Bytes, ends: Int32s, counts: Int64s) -> tuple[Corpus, int]:
    """Add concatenated pretokens, which end at ``ends`` after a first entry, from an entry of the corpus on.

    Returns the corpus and its next free entry. One-byte pretokens have no pair and are left out.
    """
    lengths = np.diff(ends)
    large_counts = counts[(counts >= FIRST_LARGE_COUNT) & (lengths > 1)]
    long_ends = np.empty(np.count_nonzero(lengths > _LONG_BYTES), np.int64)
    position = fill_corpus(pretokens, ends, counts, corpus, position, len(corpus.large_counts), long_ends)
    corpus = corpus._replace(
        large_counts=np.concatenate([corpus.large_counts, large_counts]),
        long_ends=np.concatenate([corpus.long_ends, long_ends]),
    )
    return corpus, position


@kernel
def fill_corpus(
    pretokens: Bytes, ends: Int32s, counts: Int64s, corpus: Corpus, position: int, num_large: int, long_ends: Int64s
) -> int:
    """Copy pretokens into the corpus from ``position`` on, after a boundary, and write the ends of the long ones.

    Returns the next position.
    """
    ids, boundary, num_long = corpus.ids, read(corpus.ids, 0), 0
    for row in range(len(counts)):
        begin, end = np.int64(read(ends, row)), np.int64(read(ends, row + 1))
        if end - begin < 2:
            continue
        for k in range(begin, end):
            byte = read(pretokens, k)
            write(corpus.data, position, byte)
            write(ids, position, ids.dtype.type(byte))
            position += 1
        if end - begin > _LONG_BYTES:
            write(long_ends, num_long, position)
            num_long += 1
        count = read(counts, row)
        if count >= FIRST_LARGE_COUNT:
            count = FIRST_LARGE_COUNT + num_large
            num_large += 1
        write(ids, position, boundary)
        write(ids, position + 1, ids.dtype.type(count & 0xFFFF))
        write(ids, position + 2, ids.dtype.type(count >> 16))
        write(ids, position + 3, boundary)
        position += ENTRIES_PER_PRETOKEN
    return position


@inlined
def count_and_end_at(corpus: Corpus, position: Int) -> tuple[Int, Int]:
    """Return the count and the end of the pretoken around a position, in a time that does not grow with its length."""
    ids, boundary = corpus.ids, read(corpus.ids, 0)
    last = position + _LONG_BYTES
    boundaries = equal_in_block(ids, position, boundary)
    while boundaries == 0 and position < last:
        position += 64 // ids.itemsize
        boundaries = equal_in_block(ids, position, boundary)
    end = position + first_bit(boundaries) if boundaries else long_end(corpus, position)
    count = np.int64(read(ids, end + 1)) | np.int64(read(ids, end + 2)) << 16
    large = count - FIRST_LARGE_COUNT
    return read(corpus.large_counts, large) if large >= 0 else count, end


@helper
def long_end(corpus: Corpus, position: Int) -> Int:
    """Return the end of the long pretoken around a position: the first end after the position."""
    first, stop = np.int64(0), np.int64(len(corpus.long_ends))
    while first < stop:
        middle = (first + stop) >> 1
        if read(corpus.long_ends, middle) < position:
            first = middle + 1
        else:
            stop = middle
    return read(corpus.long_ends, first)
