"""What the language of a document is told by: letters of each script, and features of py3langid's model."""

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import character_at, low_bits
from lm.kernels.jit import ONE, Bytes, Int32s, Int64s, kernel
from lm.kernels.simd import bit_count, first_bit, in_range, read, write


@kernel
def count_scripts(data: Bytes, offsets: Int64s, scripts: Bytes, latin: int, counts: Int64s) -> None:
    """Add the characters of each script in D documents to ``counts`` (D × S,), which are zeros.

    ``scripts`` (0x110000,): the script of each code point; ``latin``: that of the letters of ASCII, whose other
    characters do not count.
    """
    columns = len(counts) // max(len(offsets) - 1, 1)
    for row in range(len(offsets) - 1):
        begin, end, base = read(offsets, row), read(offsets, row + 1), row * columns
        for block in range(begin, end, 64):
            valid = low_bits(min(end - block, 64))
            letters = in_range(data, block, 0x20, 0x61, 0x7A) & valid
            write(counts, base + latin, read(counts, base + latin) + bit_count(letters))
            firsts = in_range(data, block, 0, 0xC0, 0xFF) & valid
            while firsts:
                point, _ = character_at(data, block + first_bit(firsts), end)
                firsts &= firsts - ONE
                column = base + np.int64(read(scripts, point))
                write(counts, column, read(counts, column) + 1)


@kernel
def walk_features(
    data: Bytes, next_states: Int32s, rows: Int32s, features: Int32s, counts: Int32s, found: Int32s
) -> int:
    """Count the features in a text of bytes: those of the states of a finite automaton.

    ``next_states`` (rows × 256,); ``rows`` and ``features`` (states,), −1 for a state without feature. ``counts``
    (features,), which are zeros, gets their numbers, and ``found`` the features in the order in which they occur first.
    Returns how many features there are.
    """
    state, num_found = np.int64(0), 0
    for position in range(len(data)):
        row = np.int64(read(rows, state))
        state = np.int64(read(next_states, (row << 8) + np.int64(read(data, position))))
        feature = read(features, state)
        if feature >= 0:
            count = read(counts, feature)
            if count == 0:
                write(found, num_found, feature)
                num_found += 1
            write(counts, feature, np.int32(count + 1))
    return num_found
