"""Groups of chunks: their number and sizes, and that they give the same tokens and counts as single chunks."""

import json
import math
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import Stopped, UserError
from lm.data.token_shards import write_shard
from lm.files.json import read_json
from lm.text.character_tables import tables_identity
from lm.text.chunks import Range, cut_chunks
from lm.text.config import ChunkConfig, DataConfig
from lm.text.demo_corpus import demo_stories
from lm.text.held_out import Selection
from lm.text.ingest import GroupTexts, Text
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.text.sources import Source, hash_source
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.pretoken_counts import count_to_file, read_counts
from lm.tokenizer.tokenizer import Tokenizer
from tasks.chunk import chunk, chunk_group
from tasks.count import count_group
from tasks.ingest import ingest, ingest_group
from tasks.runtime import inputs
from tasks.runtime.inputs import (
    ChunkGroup,
    Ranges,
    TextGroup,
    open_ranges,
    read_groups,
    read_text_groups,
    size_in_bytes,
    write_groups,
)
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage, stage
from tests.helpers.examples import examples
from tests.helpers.roots import materialize, run_context


def fixed_chunks(number: int, size: int = 10) -> Iterator[list[Range]]:
    return ([Range(0, size * index, size * (index + 1), False, f"{index:064x}")] for index in range(number))


def groups_of(chunks: Iterable[list[Range]], bytes_before: int = 0) -> list[dict[str, Any]]:
    """Return the groups of these chunks."""
    with tempfile.TemporaryDirectory() as place:
        write_groups(Path(place), chunks, bytes_before)
        return cast(list[dict[str, Any]], read_json(Path(place, "groups.json")))


@examples(50)
@given(chunks=st.integers(0, 3_000), bytes_before=st.integers(0, 20_000))
def test_some_hundreds_of_groups_hold_any_number_of_chunks(chunks: int, bytes_before: int) -> None:
    groups = groups_of(fixed_chunks(chunks), bytes_before)
    sizes = [group["chunks"] for group in groups]
    assert sum(sizes) == chunks
    assert len(sizes) <= 64 * (2 + math.log(max(1, chunks / 64)))
    for number, size in enumerate(sizes):
        assert 10 * (size - 1) <= (bytes_before + 10 * sum(sizes[:number])) / 64
    more = groups_of(fixed_chunks(chunks + 1), bytes_before)
    assert more[: len(groups) - 1] == groups[:-1], "one more chunk changes only the last group"


def test_the_first_groups_are_single_chunks() -> None:
    assert [group["chunks"] for group in groups_of(fixed_chunks(200))][:65] == [1] * 65
    assert [group["chunks"] for group in groups_of(fixed_chunks(200), 10 * 640)][:3] == [10, 11, 11]
    assert [group["chunks"] for group in groups_of(fixed_chunks(5, 1 << 29), 1 << 50)] == [2, 2, 1], "of 1 GiB"


def ingest_and_cut(run: RunContext, *paths: Path, target_bytes: int = 50) -> tuple[Ref, list[TextGroup], list[Ref]]:
    """Run the stages up to chunk. Return the chunks, the training texts and their cuts."""
    data = DataConfig(train=[*map(str, paths)], valid_fraction=0)
    sources = [hash_source(str(path)) for path in paths]
    ingested = [materialize(ingest_group, run, [source], 0.0, data) for source in sources]
    texts = read_text_groups(run.store, materialize(ingest, run, ingested, [], 0.0, data), ingested, "train")
    config = ChunkConfig(target_bytes=target_bytes)
    cuts = [materialize(chunk_group, run, text, [END_OF_TEXT], GPT2_PATTERN, config) for text in texts]
    return materialize(chunk, run, cuts, []), texts, cuts


def test_groups_give_the_tokens_and_counts_of_single_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MIN_GROUPS", 4)
    path = tmp_path / "text.txt"
    path.write_text("".join(demo_stories(40)), encoding="utf-8")
    vocab, merges = train_bpe(path, 300, [END_OF_TEXT])
    tokenizer = Tokenizer(vocab, merges, [END_OF_TEXT])
    chunks = list(cut_chunks([str(path)], [END_OF_TEXT], 50))
    assert len(chunks) > 20
    remaining = iter(chunks)
    groups = [[part for ranges in islice(remaining, group["chunks"]) for part in ranges] for group in groups_of(chunks)]
    assert len(groups) < len(chunks) / 2

    def tokens_and_counts(parts: list[list[Any]], name: str) -> tuple[np.ndarray, np.ndarray, dict[bytes, int]]:
        tokens, ends, counts = list[np.ndarray](), list[np.ndarray](), dict[bytes, int]()
        for number, ranges in enumerate(parts, start=1):
            out = tmp_path / f"{name}-{number}"
            out.mkdir()
            group = [(str(path), part) for part in ranges]
            write_shard(open_ranges(group, threading.Event()), tokenizer, END_OF_TEXT, out)
            ends.append(np.load(out / "documents.npy") + sum(map(len, tokens)))
            tokens.append(np.fromfile(out / "tokens.bin", "<u2"))
            texts = (blocks for blocks, *_ in open_ranges(group, threading.Event()))
            count_to_file(out / "counts.parquet", texts, [END_OF_TEXT], GPT2_PATTERN, 1 << 24)
            for row in read_counts(out / "counts.parquet").to_pylist():
                counts[row["pretoken"]] = counts.get(row["pretoken"], 0) + row["count"]
        return np.concatenate(tokens), np.concatenate(ends), counts

    single, grouped = tokens_and_counts(chunks, "single"), tokens_and_counts(groups, "group")
    np.testing.assert_array_equal(single[0], grouped[0])
    np.testing.assert_array_equal(single[1], grouped[1])
    assert single[2] == grouped[2]


def test_groups_cover_all_chunks_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MIN_GROUPS", 4)
    stories, paths = list(demo_stories(60)), [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, part in zip(paths, (stories[:30], stories[30:]), strict=True):
        path.write_text("".join(part), encoding="utf-8")
    run = run_context(tmp_path / "root")
    chunks, texts, cuts = ingest_and_cut(run, *paths)
    groups = read_groups(run.store, chunks, texts, cuts, "train")
    assert [group.chunks for group in groups[:4]] == [1] * 4
    assert groups[-1].chunks > 2, "the second text continues the growth of the first"
    opened = [group.open(run.store) for group in groups]
    ranges = [(url, part) for group in opened for url, part in group]
    assert ranges == [
        (str(path), part) for path in paths for chunk in cut_chunks([str(path)], [END_OF_TEXT], 50) for part in chunk
    ]
    assert sum(map(size_in_bytes, opened)) == sum(path.stat().st_size for path in paths)
    assert read_groups(run.store, chunks, texts, cuts, "valid") == []


def flip(path: str) -> None:
    """Make a byte invalid in UTF-8: the text fails before its digest is checked."""
    fs, place = fsspec.core.url_to_fs(path)
    fs.pipe_file(place, b"\xff" + fs.cat_file(place)[1:])


def truncate(path: str) -> None:
    fs, place = fsspec.core.url_to_fs(path)
    fs.pipe_file(place, b"")


def delete(path: str) -> None:
    fs, place = fsspec.core.url_to_fs(path)
    fs.rm_file(place)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, truncate, delete])
@pytest.mark.parametrize("file", ["source", "copied text", "chunks"])
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "s3"])
def test_a_file_that_changes_before_a_group_is_read_is_named(
    tmp_path: Path, bucket: Any, is_remote: bool, file: str, damage: Callable[[str], None]
) -> None:
    source = tmp_path / ("text.jsonl" if file == "copied text" else "text.txt")
    source.write_text('{"text": "one two"}\n' if file == "copied text" else "one two")
    run = run_context("s3://corpus/root" if is_remote else tmp_path / "root")
    chunks, texts, cuts = ingest_and_cut(run, source)
    (group,) = read_groups(run.store, chunks, texts, cuts, "train")
    chunks_url = read_output(run.store, cuts[0]).file_url("chunks.jsonl")
    path = chunks_url if file == "chunks" else group.open(run.store)[0][0]
    damage(path)
    problem = "changed or was damaged" if file == "copied text" else "(changed or was|is) damaged"
    if damage is delete and file != "copied text":
        problem = "does not exist" if file == "source" else "is missing"
    with pytest.raises(UserError, match=f"{re.escape(path.removeprefix('s3://'))} {problem}"):
        materialize(count_group, run, group, [END_OF_TEXT], GPT2_PATTERN, tables_identity(GPT2_PATTERN))


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
        tokenizers: list[Any] = list(pool.map(encode._load_tokenizer, [Path("somewhere")] * 8))
    encode._load_tokenizer_once.cache_clear()
    assert tokenizers == ["a tokenizer"] * 8
    assert len(loaded) == 1


def test_the_key_of_a_text_group_has_all_that_decides_its_chunks(tmp_path: Path) -> None:
    """Also the size of the text before it: the groups of chunks end where they have a 64th of that."""
    run = run_context(tmp_path)
    group = TextGroup(Ref("ingest-group", "k"), "ab" * 32, Selection(0), 0)
    others = [
        replace(group, digest="cd" * 32),
        replace(group, selection=Selection(0, (0, 5))),
        replace(group, bytes_before=10),
    ]
    assert all(other.identity(run) != group.identity(run) for other in others)
    assert replace(group, output=Ref("ingest-group", "other")).identity(run) == group.identity(run)


def test_an_object_enters_the_key_by_its_identity(tmp_path: Path) -> None:
    calls: list[str] = []

    @stage("sized")
    def sized(out: Attempt, group: Ranges) -> None:
        calls.append("sized")
        (out.directory / "size.txt").write_text(str(size_in_bytes(group)))

    run = run_context(tmp_path)

    def group(number: int, text: str, start: int, is_last: bool) -> ChunkGroup:
        """Return group ``number``, one range of 10 bytes, of the files of the stages ingest and chunk."""
        cut = [Range(0, start, start + 10, is_last, "cd" * 32)]

        def write_texts(out: Attempt, text: str) -> None:
            out.sources = [Source(text, 20, "ab" * 32)]
            content = GroupTexts(kept=[Text(None, 0, 20, [(start, start + 10)])])
            (out.directory / "texts.json").write_text(json.dumps(asdict(content)))

        def write_chunks(out: Attempt, cut: list[Range]) -> None:
            write_groups(out.directory, [cut] * number, 0)

        texts = TextGroup(materialize(Stage("texts", write_texts), run, text), "ab" * 32, Selection(0), 0)
        chunks = materialize(Stage("chunks", write_chunks), run, cut)
        (*_, last) = read_output(run.store, chunks).json("groups.json")
        return ChunkGroup(texts, chunks, **last)

    original, moved, without_end = (
        group(1, "/a/x.txt", 10, True),
        group(3, "/b/y.txt", 0, True),
        group(1, "/a/x.txt", 10, False),
    )
    assert materialize(sized, run, original) == materialize(sized, run, moved)
    assert calls == ["sized"]
    assert materialize(sized, run, without_end) != materialize(sized, run, original)


def test_a_text_that_changes_while_it_is_read_body_fails(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two")
    (ranges,) = cut_chunks([str(path)], [], 100)
    group = [(str(path), part) for part in ranges]
    assert [b"".join(blocks) for blocks, *_ in open_ranges(group, threading.Event())] == [b"one two"]
    path.write_text("one too")
    with pytest.raises(UserError, match=r"text\.txt changed or was damaged while the pipeline ran"):
        for blocks, *_ in open_ranges(group, threading.Event()):
            b"".join(blocks)


def test_consecutive_ranges_of_a_text_are_read_as_one(tmp_path: Path) -> None:
    """The bytes between them are of the other text. The text does not end there, so nothing is appended."""
    paths = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in paths:
        path.write_text("one|two|three|four")
    urls = [*map(str, paths), str(paths[1])]
    (ranges,) = cut_chunks(urls, ["|"], 100, ranges=[[(0, 4), (8, 18)], [(4, 8)], [(0, 4)]])
    assert len(ranges) == 4
    chunk = [(urls[part.text], part) for part in ranges]
    texts = [(b"".join(blocks), is_last) for blocks, is_last, _ in open_ranges(chunk, threading.Event())]
    assert texts == [(b"one|three|four", True), (b"two|", True), (b"one|", True)]
    paths[0].write_text("one|TWO|three|four")
    assert next(b"".join(blocks) for blocks, *_ in open_ranges(chunk, threading.Event())) == b"one|three|four"
    paths[0].write_text("onE|two|three|four")
    with pytest.raises(UserError, match=r"a\.txt changed or was damaged while the pipeline ran"):
        [b"".join(blocks) for blocks, *_ in open_ranges(chunk, threading.Event())]


def test_a_chunk_ends_early_when_the_run_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two")
    (ranges,) = cut_chunks([str(path)], [], 100)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Stopped):
        for blocks, *_ in open_ranges([(str(path), part) for part in ranges], stopping):
            b"".join(blocks)
