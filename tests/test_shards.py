"""Token shards: the files, the separator at the end of a file, and reading many shards as one sequence."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.bpe import train_merges
from lm.chunks import cut_chunks
from lm.corpus import open_range
from lm.counts import count_pretokens
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT
from lm.shards import TokenShards, write_shard
from lm.tokenizer import Tokenizer, token_dtype

EOT = END_OF_TEXT
PAD = "<| pad |>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    [counts] = count_pretokens([[story.encode() for story in demo_stories(100)]], [EOT, PAD])
    return Tokenizer(*train_merges(counts, 600, [EOT, PAD]), [EOT, PAD])


def read_shard(directory: Path, dtype: str = "<u2") -> tuple[list[int], list[int]]:
    """(ids, the places where documents end) of a shard, read without the project's reader."""
    ends = np.load(directory / "documents.npy")
    assert ends.dtype == np.int64
    return np.frombuffer((directory / "tokens.bin").read_bytes(), dtype).tolist(), ends.tolist()


def shard_of(
    tokenizer: Tokenizer, directory: Path, *texts: str | tuple[str, bool], separator: str = EOT
) -> tuple[list[int], list[int]]:
    """Write texts, whole files unless said otherwise, to a shard and read it."""
    given_texts: Iterable[tuple[list[bytes], bool]] = (
        ([text.encode()], True) if isinstance(text, str) else ([text[0].encode()], text[1]) for text in texts
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokens, documents = write_shard(given_texts, tokenizer, separator, directory)
    ids, ends = read_shard(directory, token_dtype(tokenizer.size).str)
    assert (tokens, documents) == (len(ids), len(ends))
    assert ends == [i + 1 for i, token_id in enumerate(ids) if token_id == tokenizer.special_ids[separator]]
    return ids, ends


def test_a_shard_holds_the_ids_of_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "".join(demo_stories(50))
    ids, ends = shard_of(tokenizer, tmp_path, text)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ends) == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents.npy", "tokens.bin"]


@pytest.mark.parametrize(("size", "name"), [(257, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4"), (100_000, "<u4")])
def test_ids_are_little_endian_in_the_least_type_that_holds_them(tmp_path: Path, size: int, name: str) -> None:
    assert token_dtype(size).str == name
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)} | {size - 1: EOT.encode()}, [], [EOT])
    ids, _ = shard_of(tokenizer, tmp_path, f"a{EOT}")
    assert ids == [97, size - 1]
    width = int(name[-1])
    assert (tmp_path / "tokens.bin").read_bytes() == b"a".ljust(width, b"\0") + (size - 1).to_bytes(width, "little")


def test_a_file_without_a_last_separator_gets_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = shard_of(tokenizer, tmp_path, f"one{EOT}two", "three", f"four{EOT}")
    assert tokenizer.decode(ids) == f"one{EOT}two{EOT}three{EOT}four{EOT}"
    assert len(ends) == 4


def test_white_space_after_the_last_separator_gets_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = shard_of(tokenizer, tmp_path, f"one{EOT}\n\n", f"two{EOT} \t\r\n ", f"three{EOT}")
    assert tokenizer.decode(ids) == f"one{EOT}\n\ntwo{EOT} \t\r\n three{EOT}"
    assert len(ends) == 3


@pytest.mark.parametrize("tail", ["\n.", "\n\n x \n", PAD, "é"])
def test_anything_else_after_the_last_separator_is_a_document(tokenizer: Tokenizer, tmp_path: Path, tail: str) -> None:
    ids, ends = shard_of(tokenizer, tmp_path, f"one{EOT}{tail}")
    assert tokenizer.decode(ids) == f"one{EOT}{tail}{EOT}"
    assert len(ends) == 2


def test_a_text_that_goes_on_elsewhere_gets_no_separator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = shard_of(tokenizer, tmp_path, (f"one{EOT}tw", False))
    assert tokenizer.decode(ids) == f"one{EOT}tw"
    assert len(ends) == 1


def test_another_special_token_may_be_the_separator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = shard_of(tokenizer, tmp_path, f"one{EOT}two{PAD}three", separator=PAD)
    assert tokenizer.decode(ids) == f"one{EOT}two{PAD}three{PAD}"
    assert len(ends) == 2


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_gives_an_empty_shard(tokenizer: Tokenizer, tmp_path: Path, texts: list[str]) -> None:
    assert shard_of(tokenizer, tmp_path, *texts) == ([], [])


def test_a_separator_unknown_to_the_tokenizer_is_a_users_mistake(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'<s>' is not a special token of the tokenizer"):
        write_shard([], tokenizer, "<s>", tmp_path)


pieces = st.sampled_from([EOT, EOT, PAD, "one", " two", "\n", "\n \n", "日本", "\xa0", "Once upon a time"])
texts = st.lists(pieces, max_size=15).map("".join)


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, max_size=4), st.integers(1, 8))
def test_the_buffer_size_changes_nothing(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, contents: list[str], buffer: int
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    expected = shard_of(tokenizer, directory / "whole", *contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.tokenizer.WINDOW", buffer)
        assert shard_of(tokenizer, directory / "buffered", *contents) == expected


@settings(deadline=None, max_examples=200)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 50))
def test_shards_of_chunks_join_to_the_shard_of_the_whole(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, contents: list[str], target: int
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    paths = [directory / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.encode())
    whole, whole_ends = shard_of(tokenizer, directory, *contents)
    ids: list[int] = []
    ends: list[int] = []
    for chunk in cut_chunks(list(map(str, paths)), tokenizer.special_tokens, target):
        parts = []
        for part in chunk:
            with open_range(str(paths[part.text]), part.start, part.end) as blocks:
                parts.append((b"".join(blocks).decode(), part.last))
        chunk_ids, chunk_ends = shard_of(tokenizer, directory, *parts)
        ends += [len(ids) + end for end in chunk_ends]
        ids += chunk_ids
    assert ids == whole
    assert ends == whole_ends


# reading


def write_tokens(directory: Path, shards: list[list[int]], dtype: str = "<u2") -> list[Path]:
    paths = [directory / f"{i}.bin" for i in range(len(shards))]
    for path, ids in zip(paths, shards, strict=True):
        path.write_bytes(np.array(ids, dtype).tobytes())
    return paths


places = st.none() | st.integers(-50, 50)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=5),
    st.lists(st.tuples(places, places), min_size=1, max_size=20),
    st.sampled_from([(1 << 16, "<u2"), (100_000, "<u4")]),
)
def test_slices_equal_those_of_one_array(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[int]],
    slices: list[tuple[int | None, int | None]],
    kind: tuple[int, str],
) -> None:
    vocab_size, dtype = kind
    paths = write_tokens(tmp_path_factory.mktemp("tokens"), shards, dtype)
    tokens = TokenShards(paths, vocab_size)
    expected = np.array(list(itertools.chain(*shards)), dtype)
    assert len(tokens) == len(expected)
    for start, stop in slices:
        found = tokens[start:stop]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected[start:stop])


def test_a_slice_with_a_step_is_refused(tmp_path: Path) -> None:
    tokens = TokenShards(write_tokens(tmp_path, [[1, 2, 3]]), 300)
    for step in (2, -1):
        with pytest.raises(ValueError, match="step 1"):
            tokens[::step]


def test_a_missing_shard_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.bin cannot be read"):
        TokenShards([tmp_path / "none.bin"], 300)


@pytest.mark.parametrize(("size", "vocab_size", "name"), [(3, 300, "uint16"), (6, 100_000, "uint32")])
def test_a_shard_of_odd_size_is_a_users_mistake(tmp_path: Path, size: int, vocab_size: int, name: str) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(UserError, match=f"has {size} bytes, not a whole number of {name} tokens"):
        TokenShards([path], vocab_size)


def test_an_id_past_the_vocabulary_is_a_users_mistake(tmp_path: Path) -> None:
    tokens = TokenShards(write_tokens(tmp_path, [[1, 2, 299], [300, 4]]), 300)
    assert tokens[:3].tolist() == [1, 2, 299]
    with pytest.raises(UserError, match="hold id 300, past the vocabulary of 300"):
        tokens[2:5]
