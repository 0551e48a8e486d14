"""Groups of chunks: their number and sizes, and that they give the same tokens and counts as single chunks."""

import json
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.token_shards import write_shard
from lm.text.chunks import cut_chunks
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.pretoken_counts import count_to_file, read_counts
from lm.tokenizer.tokenizer import Tokenizer
from tasks.runtime import chunk_input
from tasks.runtime.chunk_input import group_sizes, open_ranges, read_groups, size_in_bytes, write_groups
from tasks.runtime.context import Attempt
from tasks.runtime.stage import Stage
from tests.helpers.roots import materialize, run_context


def sizes_of(chunks: int) -> list[int]:
    """Return the sizes of the groups for a number of chunks."""
    sizes: list[int] = []
    for size in group_sizes():
        if sum(sizes) == chunks:
            return sizes
        sizes.append(min(size, chunks - sum(sizes)))
    raise AssertionError


@given(chunks=st.integers(0, 200_000))
def test_some_hundreds_of_groups_hold_any_number_of_chunks(chunks: int) -> None:
    sizes = sizes_of(chunks)
    assert sum(sizes) == chunks
    assert len(sizes) <= 64 * max(1, (chunks // 64 + 1).bit_length())
    for number, size in enumerate(sizes):
        assert size <= max(1, sum(sizes[:number]) / 64 + 1)
    assert sizes_of(chunks + 1)[: len(sizes) - 1] == sizes[:-1], "one more chunk changes only the last group"


def test_the_first_groups_are_single_chunks() -> None:
    assert list(islice(group_sizes(), 130)) == [1] * 64 + [2] * 64 + [4] * 2


def write_chunks(out: Attempt, text: str) -> None:
    """Write the files of the stages ingest and chunk for a text."""
    entry = {"file": None, "source": 0, "ranges": [[0, Path(text).stat().st_size]]}
    (out.directory / "texts.json").write_text(json.dumps({"train": [entry], "valid": []}))
    write_groups(out.directory, {"train": cut_chunks([text], [END_OF_TEXT], 50), "valid": []})


def test_groups_give_the_tokens_and_counts_of_single_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_input, "_GROUPS_PER_SIZE", 2)
    path = tmp_path / "text.txt"
    path.write_text("".join(demo_stories(40)), encoding="utf-8")
    vocab, merges = train_bpe(path, 300, [END_OF_TEXT])
    tokenizer = Tokenizer(vocab, merges, [END_OF_TEXT])
    chunks = list(cut_chunks([str(path)], [END_OF_TEXT], 50))
    assert len(chunks) > 20
    groups, remaining = [], iter(chunks)
    for size in group_sizes():
        if not (group := list(islice(remaining, size))):
            break
        groups.append([part for ranges in group for part in ranges])
    assert len(groups) < len(chunks) / 2

    def tokens_and_counts(parts: list[list], name: str) -> tuple[np.ndarray, np.ndarray, dict[bytes, int]]:
        tokens, ends, counts = [], [], dict[bytes, int]()
        for number, ranges in enumerate(parts, start=1):
            out = tmp_path / f"{name}-{number}"
            out.mkdir()
            group = [(str(path), part) for part in ranges]
            write_shard(open_ranges(group, threading.Event()), tokenizer, END_OF_TEXT, out)
            ends.append(np.load(out / "documents.npy") + sum(map(len, tokens)))
            tokens.append(np.fromfile(out / "tokens.bin", "<u2"))
            texts = (blocks for blocks, _ in open_ranges(group, threading.Event()))
            count_to_file(out / "counts.parquet", texts, [END_OF_TEXT], GPT2_PATTERN, 1 << 24)
            for row in read_counts(out / "counts.parquet").to_pylist():
                counts[row["pretoken"]] = counts.get(row["pretoken"], 0) + row["count"]
        return np.concatenate(tokens), np.concatenate(ends), counts

    single, grouped = tokens_and_counts(chunks, "single"), tokens_and_counts(groups, "group")
    np.testing.assert_array_equal(single[0], grouped[0])
    np.testing.assert_array_equal(single[1], grouped[1])
    assert single[2] == grouped[2]


def test_groups_cover_all_chunks_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_input, "_GROUPS_PER_SIZE", 3)
    monkeypatch.setattr(chunk_input, "text_urls", lambda output, split: [str(path)] if split == "train" else [])
    path = tmp_path / "text.txt"
    path.write_text("".join(demo_stories(30)), encoding="utf-8")
    run = run_context(tmp_path / "root")
    ref = materialize(Stage("chunks", write_chunks), run, str(path))
    groups = read_groups(run.store, ref, ref, "train")
    assert [group.chunks for group in groups[:7]] == [1, 1, 1, 2, 2, 2, 4]
    opened = [group.open(run.store) for group in groups]
    ranges = [part for group in opened for _, part in group]
    assert ranges == [part for chunk in cut_chunks([str(path)], [END_OF_TEXT], 50) for part in chunk]
    assert sum(map(size_in_bytes, opened)) == path.stat().st_size
    assert read_groups(run.store, ref, ref, "valid") == []


def test_threads_load_a_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import time
    from concurrent.futures import ThreadPoolExecutor

    from tasks import encode

    loaded: list[Path] = []

    def load(directory: Path) -> str:
        time.sleep(0.05)  # all threads ask in this time
        loaded.append(directory)
        return "a tokenizer"

    monkeypatch.setattr(Tokenizer, "load", load)
    encode._load_tokenizer_once.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        tokenizers = list(pool.map(encode._load_tokenizer, [Path("somewhere")] * 8))
    encode._load_tokenizer_once.cache_clear()
    assert tokenizers == ["a tokenizer"] * 8
    assert len(loaded) == 1
