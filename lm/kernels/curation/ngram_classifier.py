"""Score and train a linear classifier of hashed word and character n-grams."""

import math
from typing import NamedTuple

import numpy as np

from lm.kernels.jit import Bytes, Floats, Int, Int32s, Int64s, UInt64s, helper, inlined, kernel
from lm.kernels.simd import add_rows_of_4, add_rows_of_16, load64, read, write

MULTIPLIER = 0x9E3779B97F4A7C15  # odd, from the golden ratio: spreads hashes over all 64 bits
WORD_START = 0xC2B2AE3D27D4EB4F  # the hash of a word without characters
LABELS_AT_A_TIME = 4  # whose weights are one vector; a row of weights has a multiple of this length
MAX_ROWS_PER_BYTE = 2  # of a text, and two more: "a b c" has two characters, a word and a pair of words every two bytes
_SPACE, _SEPARATOR, _WORD, _LEAD = 0, 1, 2, 3


def _byte_kinds() -> Bytes:
    kinds = np.full(256, _SEPARATOR, np.uint8)
    for byte in range(256):
        if byte in b"\t\n\v\f\r ":
            kinds[byte] = _SPACE
        elif byte < 128 and chr(byte).isalnum():
            kinds[byte] = _WORD
        elif byte >= 0xC0:
            kinds[byte] = _LEAD  # of a character of two to four bytes
    return kinds


_KINDS = _byte_kinds()
_LOWER = np.frombuffer(bytes(range(256)).lower(), np.uint8)


class NgramHash(NamedTuple):
    """What decides the row of an n-gram in the table of weights."""

    shift: int
    """64 minus the bits of a row."""
    word_ngrams: int
    """0: no words, 1: words, 2: also pairs of words."""
    char_ngrams: int
    """Characters of an n-gram, at most 7; 0: none."""
    power: np.uint64
    """``MULTIPLIER ** char_ngrams``, modulo 2^64."""


# Fields of the state between two calls of _find_rows, uint64. The last characters follow, as a ring of eight.
_POSITION, _ROLLING, _WORD_HASH, _LAST_WORD, _NUM_CHARACTERS, _LAST_CHARACTER, _RING, STATE_SIZE = (
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    16,
)


@inlined
def _row(value: np.uint64, shift: Int) -> np.int32:
    value = (value ^ (value >> np.uint64(32))) * np.uint64(MULTIPLIER)
    return np.int32(value >> np.uint64(shift))


@helper
def _find_rows(data: Bytes, end: Int, ngrams: NgramHash, state: UInt64s, rows: Int32s) -> Int:
    """Write the rows of the n-grams of a text that ends at byte ``end``; return their number. Stops when ``rows`` is
    full, to be continued with the same ``state``, or after the text and a space: its position is then ``end + 1``."""
    one, multiplier = np.uint64(1), np.uint64(MULTIPLIER)
    rolling, word = read(state, _ROLLING), read(state, _WORD_HASH)
    position: Int = np.int64(read(state, _POSITION))
    last_word, count, last = read(state, _LAST_WORD), read(state, _NUM_CHARACTERS), read(state, _LAST_CHARACTER)
    num_rows, limit = 0, len(rows) - 3
    while position <= end and num_rows <= limit:
        byte = read(data, position) if position < end else np.uint8(32)
        kind, character = _KINDS[byte], np.uint64(_LOWER[byte])
        length: Int = 1
        if kind == _LEAD:
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            character = load64(data, position) & ((one << np.uint64(8 * length)) - one)
            second = (character >> np.uint64(8)) & np.uint64(255)
            is_symbol = byte == 0xC2 or (byte == 0xE2 and second <= 0x81) or (byte == 0xE3 and second == 0x80)
            kind = _SEPARATOR if is_symbol else _WORD
        elif kind == _SPACE:
            character = np.uint64(32)
        position += length
        if ngrams.word_ngrams > 0:
            if kind == _WORD:
                word = ((np.uint64(WORD_START) if word == 0 else word) ^ character) * multiplier
            elif word != 0:
                write(rows, num_rows, _row(word, ngrams.shift))
                num_rows += 1
                if ngrams.word_ngrams > 1 and last_word != 0:
                    write(rows, num_rows, _row(last_word * multiplier + word, ngrams.shift))
                    num_rows += 1
                last_word, word = word, np.uint64(0)
        if kind == _SPACE and last == 32:
            continue
        last = character
        if ngrams.char_ngrams > 0:
            first = read(state, _RING + np.int64((count - np.uint64(ngrams.char_ngrams)) & np.uint64(7)))
            write(state, _RING + np.int64(count & np.uint64(7)), character)
            rolling = rolling * multiplier + (character - first * ngrams.power)
            count += one
            write(rows, num_rows, _row(rolling, ngrams.shift))
            num_rows += 1
    write(state, _POSITION, np.uint64(position))
    write(state, _ROLLING, rolling)
    write(state, _WORD_HASH, word)
    write(state, _LAST_WORD, last_word)
    write(state, _NUM_CHARACTERS, count)
    write(state, _LAST_CHARACTER, last)
    return num_rows


@inlined
def _start(state: UInt64s, position: Int) -> None:
    for i in range(STATE_SIZE):
        write(state, i, np.uint64(0))
    write(state, _POSITION, np.uint64(position))
    write(state, _LAST_CHARACTER, np.uint64(32))  # leading white space is left out


@inlined
def _add_weights(weights: Floats, stride: Int, rows: Int32s, num_rows: Int, sums: Floats) -> None:
    """Add the weights of the rows to ``sums``, float32 (stride,)."""
    label = 0
    while label + 16 <= stride:
        add_rows_of_16(weights, label, rows, num_rows, sums)
        label += 16
    while label < stride:
        add_rows_of_4(weights, label, rows, num_rows, sums)
        label += LABELS_AT_A_TIME


@kernel
def score_documents(
    data: Bytes,
    offsets: Int64s,
    ngrams: NgramHash,
    weights: Floats,
    state: UInt64s,
    rows: Int32s,
    scores: Floats,
) -> None:
    """Write the logits of D documents to ``scores``, float32 (D, stride): the mean of the weights of their n-grams.

    ``weights`` is float32 (2^bits, stride). ``rows`` is a workspace of any size above three.
    """
    stride = weights.shape[1]
    for document in range(len(offsets) - 1):
        total, end = 0, read(offsets, document + 1)
        sums = scores[document]
        for label in range(stride):
            write(sums, label, np.float32(0))
        _start(state, read(offsets, document))
        while np.int64(read(state, _POSITION)) <= end:
            num_rows = _find_rows(data, end, ngrams, state, rows)
            _add_weights(weights, stride, rows, num_rows, sums)
            total += num_rows
        for label in range(stride):
            write(sums, label, read(sums, label) / np.float32(max(total, 1)))


@kernel
def train_epoch(
    data: Bytes,
    starts: Int64s,
    ends: Int64s,
    labels: Int32s,
    label_weights: Floats,
    learning_rates: Floats,
    ngrams: NgramHash,
    weights: Floats,
    num_labels: int,
    state: UInt64s,
    rows: Int32s,
    counts: Int32s,
    sums: Floats,
) -> float:
    """Update ``weights`` by each document in turn, and return the sum of the weighted losses, in nats.

    The documents lie in ``data`` from ``starts`` to ``ends``, in the order of training. ``rows`` has room for all
    n-grams of one. ``counts`` is int32 (2^bits,), 0 on entry and return; ``sums`` is float32 (stride,).
    """
    stride, loss = weights.shape[1], 0.0
    for document in range(len(starts)):
        _start(state, read(starts, document))
        num_rows = _find_rows(data, read(ends, document), ngrams, state, rows)
        if num_rows == 0:
            continue
        squares = np.int64(0)  # of the counts of the n-grams
        for i in range(num_rows):
            count = read(counts, np.int64(read(rows, i)))
            squares += np.int64(2) * np.int64(count) + np.int64(1)
            write(counts, np.int64(read(rows, i)), np.int32(count + 1))
        for label in range(stride):
            write(sums, label, np.float32(0))
        _add_weights(weights, stride, rows, num_rows, sums)
        largest, total = -np.inf, 0.0
        for label in range(num_labels):
            largest = max(largest, read(sums, label) / num_rows)
        for label in range(num_labels):
            total += math.exp(read(sums, label) / num_rows - largest)
        true = np.int64(read(labels, document))
        weight = read(label_weights, true)
        loss += weight * (math.log(total) + largest - read(sums, true) / num_rows)
        step = read(learning_rates, document) * weight * np.float64(num_rows) / np.float64(squares)
        for label in range(num_labels):
            probability = math.exp(read(sums, label) / num_rows - largest) / total
            write(sums, label, np.float32(step * (np.float64(label == true) - probability)))
        for i in range(num_rows):
            row = np.int64(read(rows, i))
            write(counts, row, np.int32(0))
            for label in range(num_labels):
                write(weights, row * stride + label, read(weights, row * stride + label) + read(sums, label))
    return loss
