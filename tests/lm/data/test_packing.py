"""Packing against a plain form, and its rows against the examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.chat_template import EncodedExample
from lm.data.packing import PackedRows, find_best_fit, pack_examples
from lm.model.functional import IGNORE_INDEX
from tests.helpers.examples import examples


def reference_best_fit(lengths: list[int], capacity: int) -> list[tuple[int, int]]:
    """Look at all rows for each length; the last of those with the least free space wins, by when it was last used."""
    used: list[int] = []
    last_use: list[int] = []
    places = []
    for time, length in enumerate(lengths):
        fitting = [row for row in range(len(used)) if used[row] + length <= capacity]
        if fitting:
            row = max(fitting, key=lambda row: (used[row], last_use[row]))
        else:
            row = len(used)
            used.append(0)
            last_use.append(0)
        places.append((row, used[row]))
        used[row] += length
        last_use[row] = time
    return places


@examples(400)
@given(st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=40))))
def test_best_fit_equals_the_reference(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    assert find_best_fit(lengths, capacity) == reference_best_fit(lengths, capacity)


def reference_pack(encoded: list[EncodedExample], length: int) -> tuple[list[list[tuple[int, ...]]], int, int]:
    """Return rows of (id, label, segment, position), and the numbers of cut and dropped examples."""
    kept = [example for example in encoded if any(example.is_target[1 : length + 1])]
    kept_in_order = sorted(kept, key=lambda example: -min(len(example.ids) - 1, length))
    rows: list[list[tuple[int, ...]]] = []
    sizes = [min(len(example.ids) - 1, length) for example in kept_in_order]
    for example, size, (row, _) in zip(kept_in_order, sizes, reference_best_fit(sizes, length), strict=True):
        if row == len(rows):
            rows.append([])
        segment = 1 + max((item[2] for item in rows[row]), default=0)
        for t in range(size):
            label = example.ids[t + 1] if example.is_target[t + 1] else IGNORE_INDEX
            rows[row].append((example.ids[t], label, segment, t))
    for items in rows:
        items += [(0, IGNORE_INDEX, 0, 0)] * (length - len(items))
    return rows, sum(len(example.ids) > length + 1 for example in kept), len(encoded) - len(kept)


def as_tuples(packed: PackedRows) -> list[list[tuple[int, ...]]]:
    arrays = (packed.input_ids, packed.labels, packed.segment_ids, packed.positions)
    return [[tuple(item) for item in row] for row in np.stack(arrays, -1).tolist()]


tokens = st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=14)


@examples(400)
@given(st.lists(tokens, max_size=12), st.integers(1, 10))
def test_packed_rows_equal_the_reference(lists: list[list[tuple[int, bool]]], length: int) -> None:
    encoded = [EncodedExample([i for i, _ in items], [is_target for _, is_target in items]) for items in lists]
    packed = pack_examples(encoded, length)
    assert (as_tuples(packed), packed.cut, packed.dropped) == reference_pack(encoded, length)
    assert packed.input_ids.shape == packed.labels.shape == packed.segment_ids.shape == packed.positions.shape


def test_hand_worked_rows() -> None:
    long = EncodedExample([1, 2, 3, 4, 5, 6], [False, False, True, True, True, True])
    short = EncodedExample([7, 8, 9], [False, True, True])
    prompt_only = EncodedExample([1] * 8 + [2], [False] * 8 + [True])  # a prompt longer than the context
    one_token = EncodedExample([5, 6], [False, True])
    packed = pack_examples([short, long, prompt_only, one_token, short], 4)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4], [7, 8, 7, 8], [5, 0, 0, 0]]
    x = IGNORE_INDEX
    assert packed.labels.tolist() == [[x, 3, 4, 5], [8, 9, 8, 9], [6, x, x, x]]
    assert packed.segment_ids.tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert (packed.cut, packed.dropped) == (1, 1)


def test_all_masked_and_no_examples() -> None:
    for encoded in ([], [EncodedExample([1, 2, 3], [True, False, False])]):
        packed = pack_examples(encoded, 4)
        assert packed.input_ids.shape == (0, 4) and packed.dropped == len(encoded)


@pytest.mark.parametrize("seed", [0, 1])
def test_few_places_are_wasted(seed: int) -> None:
    generator = np.random.default_rng(seed)
    encoded = [EncodedExample([1] * n, [True] * n) for n in generator.integers(10, 200, 500).tolist()]
    packed = pack_examples(encoded, 256)
    assert (packed.segment_ids > 0).mean() > 0.97
