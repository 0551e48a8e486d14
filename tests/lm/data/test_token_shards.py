"""Token shards: files, separators, reading many shards as one sequence, damaged files."""

import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.token_shards import TokenShards, write_shard
from lm.text.chunks import cut_chunks
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT
from lm.text.sources import open_ranges
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer, token_dtype
from tests.helpers.examples import examples
from tests.helpers.tokenizers import bytes_tokenizer

EOT = END_OF_TEXT
PAD = "<| pad |>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    [counts] = count_pretokens([[story.encode() for story in demo_stories(100)]], [EOT, PAD])
    return Tokenizer(*train_merges(counts, 600, [EOT, PAD]), [EOT, PAD])


def read_shard(directory: Path, dtype: str = "<u2") -> tuple[list[int], list[int]]:
    """Read (ids, ends of the documents) of a shard without ``TokenShards``."""
    ends = np.load(directory / "documents.npy")
    assert ends.dtype == np.int64
    return np.frombuffer((directory / "tokens.bin").read_bytes(), dtype).tolist(), ends.tolist()


def write_and_read_shard(
    tokenizer: Tokenizer, directory: Path, *texts: str | tuple[str, bool], separator: str = EOT
) -> tuple[list[int], list[int]]:
    """Write texts, each a whole file or (text, is_last), to a shard and read it."""
    given_texts: Iterable[tuple[list[bytes], bool, str]] = (
        ([text.encode()], True, "") if isinstance(text, str) else ([text[0].encode()], text[1], "") for text in texts
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokens, documents = write_shard(given_texts, tokenizer, separator, directory)
    ids, ends = read_shard(directory, token_dtype(tokenizer.size).str)
    assert (tokens, documents) == (len(ids), len(ends))
    assert ends == [i + 1 for i, token_id in enumerate(ids) if token_id == tokenizer.special_ids[separator]]
    return ids, ends


def test_a_shard_holds_the_ids_of_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "".join(demo_stories(50))
    ids, ends = write_and_read_shard(tokenizer, tmp_path, text)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ends) == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents.npy", "tokens.bin"]


@pytest.mark.parametrize(("size", "name"), [(257, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4"), (100_000, "<u4")])
def test_ids_are_little_endian_in_the_smallest_sufficient_dtype(tmp_path: Path, size: int, name: str) -> None:
    assert token_dtype(size).str == name
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)} | {size - 1: EOT.encode()}, [], [EOT])
    ids, _ = write_and_read_shard(tokenizer, tmp_path, f"a{EOT}")
    assert ids == [97, size - 1]
    width = int(name[-1])
    assert (tmp_path / "tokens.bin").read_bytes() == b"a".ljust(width, b"\0") + (size - 1).to_bytes(width, "little")


def test_a_missing_last_separator_is_added(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = write_and_read_shard(tokenizer, tmp_path, f"one{EOT}two", "three", f"four{EOT}")
    assert tokenizer.decode(ids) == f"one{EOT}two{EOT}three{EOT}four{EOT}"
    assert len(ends) == 4


def test_white_space_after_the_last_separator_is_no_document(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = f"one{EOT}\n\n", f"two{EOT} \t\r\n ", f"three{EOT}", f"four{EOT}\u3000\xa0\u2028\n"
    ids, ends = write_and_read_shard(tokenizer, tmp_path, *texts)
    assert tokenizer.decode(ids) == "".join(texts)
    assert len(ends) == 4


@pytest.mark.parametrize("tail", ["\n.", "\n\n x \n", PAD, "é", "\u200b"])
def test_other_text_after_the_last_separator_is_a_document(tokenizer: Tokenizer, tmp_path: Path, tail: str) -> None:
    ids, ends = write_and_read_shard(tokenizer, tmp_path, f"one{EOT}{tail}")
    assert tokenizer.decode(ids) == f"one{EOT}{tail}{EOT}"
    assert len(ends) == 2


def test_a_text_that_continues_in_another_shard_gets_no_separator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = write_and_read_shard(tokenizer, tmp_path, (f"one{EOT}tw", False))
    assert tokenizer.decode(ids) == f"one{EOT}tw"
    assert len(ends) == 1


def test_another_special_token_may_be_the_separator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = write_and_read_shard(tokenizer, tmp_path, f"one{EOT}two{PAD}three", separator=PAD)
    assert tokenizer.decode(ids) == f"one{EOT}two{PAD}three{PAD}"
    assert len(ends) == 2


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_gives_an_empty_shard(tokenizer: Tokenizer, tmp_path: Path, texts: list[str]) -> None:
    assert write_and_read_shard(tokenizer, tmp_path, *texts) == ([], [])


class _Vocab(dict[int, bytes]):
    """A vocabulary that only answers for single tokens."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole vocabulary was read")

    items = values = keys = __iter__  # type: ignore[assignment]


def test_a_shard_does_not_read_the_whole_vocabulary(tmp_path: Path) -> None:
    """A large vocabulary took a third of the time of each shard."""
    tokenizer = bytes_tokenizer([EOT])
    tokenizer.encode(EOT)
    tokenizer.vocab = _Vocab(tokenizer.vocab)
    for text in (f"a{EOT}b", f"a{EOT} \n\n", f"a{EOT}\xa0\u2003 ", f"a{EOT}\xa0é"):
        _, ends = write_and_read_shard(tokenizer, tmp_path, text)
        assert len(ends) == 1 + bool(text.split(EOT)[1].strip())


def test_an_unknown_separator_is_rejected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'<s>' is not a special token of the tokenizer"):
        write_shard([], tokenizer, "<s>", tmp_path)


fragments = st.sampled_from([EOT, EOT, PAD, "one", " two", "\n", "\n \n", "日本", "\xa0", "Once upon a time"])
texts = st.lists(fragments, max_size=15).map("".join)


@examples(100)
@given(st.lists(texts, max_size=4), st.integers(1, 8))
def test_the_window_size_does_not_change_the_shard(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, contents: list[str], window: int
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    expected = write_and_read_shard(tokenizer, directory / "whole", *contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.tokenizer.tokenizer.Tokenizer.encode_blocks.__defaults__", ("all", window))
        assert write_and_read_shard(tokenizer, directory / "windowed", *contents) == expected


@examples(200)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 50))
def test_shards_of_chunks_join_to_the_shard_of_the_whole(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, contents: list[str], target: int
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    paths = [directory / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.encode())
    whole, whole_ends = write_and_read_shard(tokenizer, directory, *contents)
    ids: list[int] = []
    ends: list[int] = []
    for chunk in cut_chunks(list(map(str, paths)), tokenizer.special_tokens, target):
        parts = []
        for part in chunk:
            with open_ranges(str(paths[part.text]), [(part.start, part.end)]) as blocks:
                parts.append((b"".join(blocks).decode(), part.last))
        chunk_ids, chunk_ends = write_and_read_shard(tokenizer, directory, *parts)
        ends += [len(ids) + end for end in chunk_ends]
        ids += chunk_ids
    assert ids == whole
    assert ends == whole_ends


def write_tokens(directory: Path, shards: list[list[int]], dtype: str = "<u2") -> list[Path]:
    paths = [directory / f"{i}.bin" for i in range(len(shards))]
    for path, ids in zip(paths, shards, strict=True):
        path.write_bytes(np.array(ids, dtype).tobytes())
    return paths


positions = st.none() | st.integers(-50, 50)


@examples(60)
@given(
    st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=5),
    st.lists(st.tuples(positions, positions), min_size=1, max_size=20),
    st.sampled_from([(1 << 16, "<u2"), (100_000, "<u4")]),
)
def test_slices_equal_those_of_one_array(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[int]],
    slices: list[tuple[int | None, int | None]],
    size_and_dtype: tuple[int, str],
) -> None:
    vocab_size, dtype = size_and_dtype
    paths = write_tokens(tmp_path_factory.mktemp("tokens"), shards, dtype)
    tokens = TokenShards(paths, vocab_size)
    expected = np.array(list(itertools.chain(*shards)), dtype)
    assert len(tokens) == len(expected)
    for start, stop in slices:
        ids = tokens[start:stop]
        assert ids.dtype == dtype
        np.testing.assert_array_equal(ids, expected[start:stop])


def test_a_slice_with_a_step_is_rejected(tmp_path: Path) -> None:
    tokens = TokenShards(write_tokens(tmp_path, [[1, 2, 3]]), 300)
    for step in (2, -1):
        with pytest.raises(ValueError, match="step 1"):
            tokens[::step]


def test_a_missing_shard_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.bin cannot be read"):
        TokenShards([tmp_path / "none.bin"], 300)


@pytest.mark.parametrize(("size", "vocab_size", "name"), [(3, 300, "uint16"), (6, 100_000, "uint32")])
def test_a_shard_of_odd_size_is_rejected(tmp_path: Path, size: int, vocab_size: int, name: str) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(UserError, match=f"has {size} bytes, not a whole number of {name} tokens"):
        TokenShards([path], vocab_size)


def test_an_id_past_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    tokens = TokenShards(write_tokens(tmp_path, [[1, 2, 299], [300, 4]]), 300)
    assert tokens[:3].tolist() == [1, 2, 299]
    with pytest.raises(UserError, match="hold id 300, past the vocabulary of 300"):
        tokens[2:5]


def count_open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_many_shards_need_few_file_descriptors(tmp_path: Path) -> None:
    shards = [[number % 300, (number + 1) % 300] for number in range(500)]
    before = count_open_files()
    tokens = TokenShards(write_tokens(tmp_path, shards), 300)
    for start in (*range(0, 1000, 7), *range(999, 0, -11)):
        assert tokens[start : start + 9].tolist() == list(itertools.chain(*shards))[start : start + 9]
    assert 0 < count_open_files() - before <= 64
    del tokens
    assert count_open_files() == before


def test_threads_read_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two open files at most, nearly every read closes a file that another thread may be reading."""
    monkeypatch.setattr("lm.data.token_shards._MAX_OPEN_FILES", 2)
    expected = np.random.default_rng(0).integers(0, 60_000, 40_000).astype("<u2")
    tokens = TokenShards(write_tokens(tmp_path, np.split(expected, 40)), 1 << 16)  # type: ignore[arg-type]

    def read(seed: int) -> bool:
        starts = np.random.default_rng(seed).integers(0, 39_000, 500).tolist()
        return all(np.array_equal(tokens[i : i + 999], expected[i : i + 999]) for i in starts)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for more than 2 GB."""
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: read(file, [memoryview(buffers[0]).cast("B")[:3]], offset)
    )
    tokens = TokenShards(write_tokens(tmp_path, [list(range(50)), list(range(50, 99))]), 300)
    assert tokens[3:97].tolist() == list(range(3, 97))


@pytest.mark.parametrize("damage", ["shortened", "removed"])
def test_a_shard_damaged_after_opening_is_rejected(tmp_path: Path, damage: str) -> None:
    paths = write_tokens(tmp_path, [[1, 2, 3], [4, 5, 6]])
    tokens = TokenShards(paths, 300)
    if damage == "shortened":
        paths[1].write_bytes(b"\4\0")
    else:
        paths[1].unlink()
    assert tokens[:3].tolist() == [1, 2, 3]
    with pytest.raises(UserError, match=r"1\.bin (was truncated|cannot be read)"):
        tokens[2:6]
