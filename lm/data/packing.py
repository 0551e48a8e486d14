"""Packing of training examples into rows of one length, without attention between examples.

Each example stays whole, and goes to the row with the least free space that still fits it, the longest example first
(best-fit decreasing; Ding et al. 2024). Attention must be limited to tokens with the same segment id, as in
:func:`lm.model.ops.causal_attention.make_segment_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lm.data.chat_template import EncodedExample
from lm.model.functional import IGNORE_INDEX


@dataclass(frozen=True)
class PackedRows:
    """Examples in rows of equal length; all arrays are int64 (rows, length).

    Unused positions at the end of a row have id 0, no label, segment 0 and position 0.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    """The next token of the same example where it is a target, elsewhere ``IGNORE_INDEX``."""
    segment_ids: npt.NDArray[np.int64]
    """1 for the tokens of a row's first example, 2 for the second and so on."""
    positions: npt.NDArray[np.int64]
    """Position of a token in its example, from 0."""
    cut: int
    """Number of examples that were cut at their end, because they are longer than a row."""
    dropped: int
    """Number of examples without a target in their first ``length`` tokens and the next; they are left out."""


def pack_examples(examples: Sequence[EncodedExample], context_length: int) -> PackedRows:
    """Pack ``examples`` into rows of ``context_length`` tokens. The last token of an example is a label only."""
    limit = context_length + 1
    kept = [example for example in examples if has_target(example, context_length)]
    lengths = [min(len(example.ids), limit) - 1 for example in kept]
    order = sorted(range(len(kept)), key=lambda index: -lengths[index])  # stable
    places = find_best_fit([lengths[index] for index in order], context_length)
    row_count = 1 + max((row for row, _ in places), default=-1)
    input_ids, labels, segment_ids, positions = np.zeros((4, row_count, context_length), np.int64)
    labels[:] = IGNORE_INDEX
    segments = [0] * row_count
    for index, (row, start) in zip(order, places, strict=True):
        example, length = kept[index], lengths[index]
        ids = np.asarray(example.ids[: length + 1], np.int64)
        place = slice(start, start + length)
        segments[row] += 1
        input_ids[row, place] = ids[:-1]
        labels[row, place] = np.where(example.is_target[1 : length + 1], ids[1:], IGNORE_INDEX)
        segment_ids[row, place] = segments[row]
        positions[row, place] = np.arange(length)
    cut = sum(len(example.ids) > limit for example in kept)
    return PackedRows(input_ids, labels, segment_ids, positions, cut, len(examples) - len(kept))


def has_target(example: EncodedExample, context_length: int) -> bool:
    """Return whether a row of ``context_length`` tokens has a target of the example."""
    return any(example.is_target[1 : context_length + 1])


def find_best_fit(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Return (row, start) of each length, in the given order: the fullest row that fits it, of equal rows the newest.

    Lengths are 1 to ``capacity``. Bit ``k`` of an integer says whether a row has ``k`` free tokens, so a search costs
    one shift, not a pass over the rows.
    """
    rows_by_free: list[list[int]] = [[] for _ in range(capacity + 1)]
    non_empty, row_count = 0, 0
    places = []
    for length in lengths:
        fitting = non_empty >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                non_empty ^= 1 << free
        else:
            row, free = row_count, capacity
            row_count += 1
        places.append((row, capacity - free))
        rows_by_free[free - length].append(row)
        non_empty |= 1 << (free - length)
    return places
