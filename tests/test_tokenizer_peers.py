"""Other libraries that encode: tiktoken and Hugging Face, on real text and on any."""

import json
import lzma
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.bpe import train_merges
from lm.demo_corpus import demo_stories
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer import Tokenizer
from tests.tokenizers_made import bytes_tokenizer, counts_table, pieces


def is_classified_alike(text: str) -> bool:
    """Whether every Unicode table gives these characters their classes: each library has the table of its own year.

    Unicode 3.2, which Python keeps, is older than all of them. A character that it knows and that has the same
    category today is a letter, a number or neither in every version between.
    """
    return all(unicodedata.ucd_3_2_0.category(c) == unicodedata.category(c) != "Cn" for c in text)


known_characters = st.characters(codec="utf-8").filter(is_classified_alike)
known_text = st.lists(pieces | st.text(known_characters, max_size=10), max_size=10).map("".join)


def hugging_face(directory: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def both_saved(
    tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Tokenizer, Any]]:
    """The two trained tokenizers, each with what Hugging Face reads from its files."""
    saved = []
    for ours in (tokenizer, custom_tokenizer):
        directory = tmp_path_factory.mktemp("tokenizer")
        ours.save(directory)
        saved.append((ours, hugging_face(directory)))
    return saved


@settings(deadline=None, max_examples=200)
@given(known_text)
def test_hugging_face_reads_our_file_and_encodes_the_same(both_saved: list[tuple[Tokenizer, Any]], text: str) -> None:
    for ours, theirs in both_saved:
        ids = ours.encode(text)
        assert theirs.encode(text).ids == ids
        if "é!" not in text:  # Hugging Face reads special tokens in the byte spelling too when it decodes
            assert theirs.decode(ids, skip_special_tokens=False) == text


def test_hugging_face_encodes_stories_the_same(both_saved: list[tuple[Tokenizer, Any]]) -> None:
    text = "".join(demo_stories(300, seed=1))
    for ours, theirs in both_saved:
        assert theirs.encode(text).ids == ours.encode(text)


def test_hugging_face_knows_special_tokens_missing_from_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(["<s>", "日本"])
    tokenizer.save(tmp_path)
    text = "a<s>b 日本 é"
    assert hugging_face(tmp_path).encode(text).ids == tokenizer.encode(text)


@pytest.fixture(scope="module")
def tiktoken_gpt2(shared_data: Path) -> Any:
    """tiktoken's GPT-2 out of the published vocabulary, read here apart from ``lm.formats``."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    spellings = json.loads((shared_data / "gpt2_vocab.json").read_text(encoding="utf-8"))
    end_of_text = spellings.pop(END_OF_TEXT)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={bytes(map(byte_of.__getitem__, text)): rank for text, rank in spellings.items()},
        special_tokens={END_OF_TEXT: end_of_text},
    )


@pytest.mark.parametrize(
    "name", ["tinyshakespeare.txt", "tinystories_sample.txt", "stories_valid.txt.xz", "stories_train.txt.xz"]
)
def test_gpt2_equals_tiktoken_on_real_text(gpt2: Tokenizer, tiktoken_gpt2: Any, shared_data: Path, name: str) -> None:
    with (lzma.open if name.endswith(".xz") else open)(shared_data / name, "rb") as file:
        text = file.read(2_000_000).decode(errors="ignore")
    expected = tiktoken_gpt2.encode(text, allowed_special="all")
    assert gpt2.encode(text) == expected
    assert gpt2.decode(expected) == text


@settings(deadline=None, max_examples=500)
@given(known_text | st.text(known_characters, max_size=60))
def test_gpt2_equals_tiktoken_on_any_text(gpt2: Tokenizer, tiktoken_gpt2: Any, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode(text, allowed_special="all")
    assert gpt2.encode(text, allowed_special=()) == tiktoken_gpt2.encode_ordinary(text)


@settings(deadline=None, max_examples=200)
@given(st.text("a1 \n\t'sdmtlverS\u00a0\u3000\x1c\x85!é", max_size=40))
def test_gpt2_equals_tiktoken_on_contractions_and_white_space(gpt2: Tokenizer, tiktoken_gpt2: Any, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


def test_gpt2_files_are_written_as_they_were_read(gpt2: Tokenizer, shared_data: Path, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    assert (tmp_path / "merges.txt").read_bytes().rstrip() == (shared_data / "gpt2_merges.txt").read_bytes().rstrip()
    ours = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    assert ours == json.loads((shared_data / "gpt2_vocab.json").read_text(encoding="utf-8"))


@given(st.text(known_characters, max_size=60))
@settings(deadline=None, max_examples=100)
def test_a_tokenizer_of_our_own_equals_tiktoken(text: str) -> None:
    """Needs no files of GPT-2's: tiktoken takes our ids for ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    counts = [(word.encode(), 9 - i) for i, word in enumerate((" the", " then", " other", "ing", "123", "…", " don"))]
    vocab, merges = train_merges(counts_table(dict(counts)), 290, [END_OF_TEXT])
    ranks = {token: token_id for token_id, token in vocab.items() if token_id != 256}
    theirs = tiktoken.Encoding("ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})
    text += " the other thing, don't 123" + END_OF_TEXT + text
    assert Tokenizer(vocab, merges, [END_OF_TEXT]).encode(text) == theirs.encode(text, allowed_special="all")
