from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import StorageError, UserError
from lm.curate import sorted_runs
from lm.curate.sorted_runs import Keys, Run, merge_runs, open_runs, write_runs

IDENTITY = {"kind": "test"}
keys_of_parts = st.lists(
    st.lists(st.tuples(st.sampled_from([0, 1, 5, 1 << 40, 1 << 63, (1 << 64) - 1]), st.integers(0, 2)), max_size=9),
    max_size=4,
)


def part(pairs: list[tuple[int, int]], is_long: bool) -> Keys:
    keys, lows = (np.array([pair[half] for pair in pairs], np.uint64) for half in (0, 1))
    return Keys(keys, lows if is_long else None, np.arange(len(pairs)), len(pairs))


def sort_on_disk(groups: list[list[list[tuple[int, int]]]], folder: Path, is_long: bool) -> list[tuple[int, ...]]:
    """Return (key, low half, item) of all records, with those of repeated items, after a sort in groups of parts."""
    paths = []
    for number, parts in enumerate(groups):
        group = folder / str(number)
        group.mkdir(exist_ok=True)
        paths += write_runs([part(pairs, is_long) for pairs in parts], group, "test", IDENTITY)
    runs, rows = open_runs(paths, IDENTITY), []
    for records in merge_runs(runs):
        lows = np.zeros_like(records.keys) if records.lows is None else records.lows
        rows += [*zip(records.keys.tolist(), lows.tolist(), records.items.tolist(), strict=True)]
    assert rows == sorted(rows)
    start, by_item = 0, {item: (key, low) for key, low, item in rows}
    for run in runs:
        rows += [(*by_item[first + start], item + start) for item, first in run.read_repeats().tolist()]
        start += run.num_items
    return sorted(rows)


@given(parts=keys_of_parts, is_long=st.booleans(), cuts=st.sets(st.integers(1, 3)))
def test_records_are_sorted_through_all_runs(
    parts: list[list[tuple[int, int]]], is_long: bool, cuts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    bounds = [0, *sorted(cuts), max(4, len(parts))]
    groups = [parts[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    pairs = [pair for part in parts for pair in part]
    expected = sorted((key, low if is_long else 0, item) for item, (key, low) in enumerate(pairs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_runs, "_BLOCK_RECORDS", 2)
        patch.setattr(sorted_runs, "_RANGE_RECORDS", 3)
        patch.setattr(sorted_runs, "_MAX_RUN_RECORDS", 10)
        assert sort_on_disk(groups, tmp_path_factory.mktemp("runs"), is_long) == expected


def test_large_runs_are_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "_RANGE_RECORDS", 10_000)
    keys = np.random.default_rng(0).integers(0, 1 << 64, 50_000, np.uint64)
    parts = [
        Keys(keys[i : i + 7_000], None, np.arange(len(keys[i : i + 7_000])), 7_000) for i in range(0, 50_000, 7_000)
    ]
    paths = [path for i, p in enumerate(parts) for path in write_runs([p], tmp_path, f"{i}", IDENTITY)]
    merged = [*merge_runs(open_runs(paths, IDENTITY))]
    assert max(len(records.keys) for records in merged) < 12_000
    order = np.argsort(keys, kind="stable")
    assert np.array_equal(np.concatenate([records.items for records in merged]), order)


def write_one(folder: Path) -> Path:
    pairs = [(number << 50, number) for number in range(7)] * 2
    [path] = write_runs([part(pairs, True)], folder, "test", IDENTITY)
    return path


def read_all(path: Path) -> Any:
    runs = open_runs([path], IDENTITY)
    return [(records.keys.tolist(), records.items.tolist()) for records in merge_runs(runs)], runs[0].read_repeats()


def test_any_changed_byte_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "_BLOCK_RECORDS", 3)
    path = write_one(tmp_path)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])
        with pytest.raises(StorageError, match=f"{path} is damaged: .*Delete it, and sign its documents again"):
            read_all(path)


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_a_cut_file_is_noticed(tmp_path: Path, size: int) -> None:
    path = write_one(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StorageError, match=f"{path} is damaged"):
        read_all(path)


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        Run(tmp_path / "none")


def test_runs_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = write_one(tmp_path)
    with pytest.raises(UserError, match=r"was made with .*test.*, not with .*other.*; make it again"):
        open_runs([path], {"kind": "other"})


def test_no_runs_have_no_records() -> None:
    assert [*merge_runs([])] == []
