"""Pretoken counts: equal to the reference, in little memory, and their Parquet files."""

import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.chunks import FilePart
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.text.text_windows import WINDOW
from lm.tokenizer.pretoken_counts import (
    DEFAULT_MEMORY_BYTES,
    SCHEMA,
    count_files,
    count_pretokens,
    count_to_file,
    merge_counts,
    read_counts,
    summarize_counts,
    write_counts,
)
from tests.helpers.corpora import COMPRESSIONS
from tests.helpers.examples import examples
from tests.helpers.kernels import patterns
from tests.helpers.pretoken_counts import counts_table, make_text, reference_counts, to_counter
from tests.helpers.tokenizers import CUSTOM_PATTERN, SPECIALS, text_fragments

SMALL_MEMORY_BYTES = 1 << 20  # less than the smallest table takes
texts = st.lists(text_fragments, max_size=25).map("".join)
texts_with_long_runs = st.lists(
    text_fragments | st.text(max_size=8) | st.integers(1, 200).map("\x00é".__mul__), max_size=15
).map("".join)


def split_blocks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


@examples(300)
@given(patterns, st.lists(texts_with_long_runs, max_size=3), st.integers(1, 50), st.integers(1, 200))
def test_counts_in_blocks_and_windows_equal_the_reference(
    pattern: str, contents: list[str], size: int, window: int
) -> None:
    specials = [*SPECIALS, "<|endof", "<"]  # common prefixes
    expected = sum((reference_counts(text, specials, pattern) for text in contents), Counter())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.text.text_windows.text_windows.__defaults__", (window,))
        [table] = count_pretokens([split_blocks(text.encode(), size) for text in contents], specials, pattern)
    assert len(table) == len(expected)
    assert to_counter([table]) == expected


@examples(100)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=5), st.integers(1, 6), max_size=30), st.integers(1, 7))
def test_rare_pretokens_are_left_out_when_counts_are_read(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[str, int], min_count: int
) -> None:
    path = tmp_path_factory.mktemp("counts") / "counts.parquet"
    write_counts(path, counts_table(counts))
    expected = {pretoken: count for pretoken, count in counts.items() if count >= min_count}
    assert to_counter([read_counts(path, min_count)]) == expected
    kept = summarize_counts(path, [1, min_count]).kept[min_count]
    assert kept == (len(expected), sum(map(len, expected)), sum(expected.values()))


def test_the_summary_has_the_most_common_and_the_longest_pretokens(tmp_path: Path) -> None:
    counts = {f"word{number:03}" + "x" * (number % 7): 1 + number * number % 101 for number in range(1_000)}
    path = tmp_path / "counts.parquet"
    write_counts(path, counts_table(counts))
    summary = summarize_counts(path, [1], num_common=15, num_longest=12)
    rows = [(pretoken.encode(), count) for pretoken, count in counts.items()]
    assert summary.common == sorted(rows, key=lambda row: (-row[1], row[0]))[:15]
    assert [len(pretoken) for pretoken, _ in summary.longest] == [13] * 12
    assert set(summary.longest) <= set(rows)
    ranks, counts_of_ranks = summary.counts_by_rank
    descending = sorted(counts.values(), reverse=True)
    assert [descending[rank - 1] for rank in ranks] == counts_of_ranks.tolist()
    assert (ranks[0], ranks[-1], summary.unique, summary.total) == (1, 1_000, 1_000, sum(counts.values()))


def test_a_partition_of_more_than_a_million_pretokens_is_one_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.kernels.bpe.count.assign_partitions", lambda *arguments: None)  # all in partition 0
    table = pa.table([[b"%d" % number for number in range(1 << 20 | 1)], [1] * (1 << 20 | 1)], schema=SCHEMA)
    write_counts(tmp_path / "counts.parquet", table)
    assert len(read_counts(tmp_path / "counts.parquet")) == len(table)


@pytest.mark.parametrize("prefix", ["", "x" * 20, "\x00" * 15], ids=["short", "long", "nul"])
def test_counts_of_more_pretokens_than_initial_slots(prefix: str) -> None:
    text = make_text(60_000, prefix)
    tables = list(count_pretokens([[text.encode()]], []))
    assert len(tables) == 1
    assert to_counter(tables) == reference_counts(text, [], GPT2_PATTERN)


@pytest.mark.parametrize("prefix", ["", "x" * 1500], ids=["short", "long"])
def test_a_small_memory_gives_more_tables_with_the_same_sum(tmp_path: Path, prefix: str) -> None:
    text = make_text(70_000 if not prefix else 3_000, prefix)
    contents = [text, text[: len(text) // 2], ""]
    blocks = [list(split_blocks(content.encode(), 100_003)) for content in contents]
    expected = sum((reference_counts(content, [], GPT2_PATTERN) for content in contents), Counter())
    tables = list(count_pretokens(blocks, [], memory_bytes=SMALL_MEMORY_BYTES))
    assert len(tables) > 2
    assert to_counter(tables) == expected
    assert len(list(count_pretokens(blocks, []))) == 1
    totals = expected.total(), len(expected)
    assert count_to_file(tmp_path / "spilled.parquet", blocks, [], GPT2_PATTERN, SMALL_MEMORY_BYTES) == totals
    assert count_to_file(tmp_path / "whole.parquet", blocks, [], GPT2_PATTERN, DEFAULT_MEMORY_BYTES) == totals
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spilled.parquet", "whole.parquet"]
    assert (tmp_path / "spilled.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert to_counter([read_counts(tmp_path / "whole.parquet")]) == expected


def test_a_column_with_too_many_bytes_becomes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.tokenizer.pretoken_counts._MAX_COLUMN_BYTES", 1000)
    text = make_text(3_000, "x" * 1500)
    tables = list(count_pretokens([[text.encode()]], []))
    assert len(tables) > 1
    assert to_counter(tables) == reference_counts(text, [], GPT2_PATTERN)


def test_a_pretoken_that_is_larger_than_the_memory() -> None:
    text = f"one {'y' * 3_000_000} two {'z' * 3_000_000}"
    tables = count_pretokens([[text.encode()]], [], memory_bytes=SMALL_MEMORY_BYTES)
    assert to_counter(tables) == reference_counts(text, [], GPT2_PATTERN)


@examples(200)
@given(st.lists(texts, max_size=5))
def test_counts_with_a_custom_pattern_equal_the_reference(blocks: list[str]) -> None:
    counts = count_pretokens([[block.encode() for block in blocks]], SPECIALS, CUSTOM_PATTERN)
    assert to_counter(counts) == reference_counts("".join(blocks), SPECIALS, CUSTOM_PATTERN)


def test_counts_of_a_text_longer_than_a_window() -> None:
    text = "".join(demo_stories(2000))
    data = text.encode()
    assert len(data) > WINDOW
    counts = count_pretokens([split_blocks(data, 5003)], [END_OF_TEXT])
    assert to_counter(counts) == reference_counts(text, [END_OF_TEXT], GPT2_PATTERN)


some_counts = st.dictionaries(
    st.text(max_size=4) | st.sampled_from(["the", " the", "日本"]), st.integers(1, 9), max_size=12
)


def rows(path: Path) -> list[list[tuple[bytes, int]]]:
    """Return the rows of each row group."""
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(i).to_pydict() for i in range(file.num_row_groups)]
    return [list(zip(group["pretoken"], group["count"], strict=True)) for group in groups]


@examples(60)
@given(st.lists(some_counts, min_size=1, max_size=4))
def test_merged_counts_are_added_up_and_sorted_in_each_partition(
    tmp_path_factory: pytest.TempPathFactory, parts: list[dict[str, int]]
) -> None:
    directory = tmp_path_factory.mktemp("counts")
    paths = [directory / f"{i}.parquet" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_counts(path, counts_table(part))
    total = sum(map(Counter, parts), Counter())
    assert merge_counts(paths, directory / "all.parquet") == (total.total(), len(total))
    assert to_counter([read_counts(directory / "all.parquet")]) == total
    assert pq.read_schema(directory / "all.parquet").equals(SCHEMA)
    for group in rows(directory / "all.parquet"):
        assert group == sorted(group, key=lambda row: (-row[1], row[0]))
    merge_counts(paths[::-1], directory / "again.parquet")
    assert (directory / "again.parquet").read_bytes() == (directory / "all.parquet").read_bytes()
    write_counts(directory / "once.parquet", counts_table(total))
    assert rows(directory / "once.parquet") == rows(directory / "all.parquet")


def test_more_files_are_merged_than_a_process_may_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.parquet" for i in range(80)]
    for path in paths:
        write_counts(path, counts_table({"a": 1}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    try:
        assert merge_counts(paths, tmp_path / "all.parquet") == (80, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_holds_no_counts_raises_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"pretoken": ["a"], "count": ["b"]}), tmp_path / "types.parquet")
    for name in ("none", "text", "other", "types"):
        with pytest.raises(UserError, match=rf"{name}\.parquet is not a Parquet file of pretoken counts"):
            list(read_counts(tmp_path / f"{name}.parquet"))


def test_counts_of_files_are_summed_while_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred equal tables take the memory of a few."""
    words = [b"%x" % (number * 0x9E3779B1) for number in range(10_000)]
    size = counts_table(dict.fromkeys(words, 1)).nbytes
    allocated: list[int] = []

    def many_tables(*arguments: object) -> Iterator[pa.Table]:
        for _ in range(100):
            allocated.append(pa.total_allocated_bytes() - before)
            yield counts_table(dict.fromkeys(words, 1))

    monkeypatch.setattr("lm.tokenizer.pretoken_counts.count_pretokens", many_tables)
    monkeypatch.setattr("lm.tokenizer.pretoken_counts.DEFAULT_MEMORY_BYTES", 3 * size)
    before = pa.total_allocated_bytes()
    (tmp_path / "text.txt").write_text("text")
    table = count_files([tmp_path / "text.txt"], [], threads=1)
    assert table.num_rows == len(words) and set(table["count"].to_pylist()) == {100}
    assert max(allocated) < 10 * size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_file_ends_the_count_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    paths = [tmp_path / f"0.txt{suffix}", *(tmp_path / f"{number}.txt" for number in range(1, 50))]
    paths[0].write_bytes(COMPRESSIONS[suffix](b"text " * 1000)[:-9])
    for path in paths[1:]:
        path.write_text("text")
    opened, open_part = [], FilePart.open

    def open_slowly(part: FilePart) -> AbstractContextManager[Iterator[bytes]]:
        opened.append(part.path)
        time.sleep(0 if part.path == str(paths[0]) else 0.05)
        return open_part(part)

    monkeypatch.setattr(FilePart, "open", open_slowly)
    with pytest.raises(UserError, match="corrupt or truncated"):
        count_files(paths, [], threads=2)
    assert len(opened) < 25
