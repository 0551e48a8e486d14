"""Equal ids with tiktoken and Hugging Face."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.text.demo_corpus import demo_stories
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.pretoken_counts import counts_table
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer, stable_characters, stable_text


def hugging_face(directory: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_pairs(
    tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Tokenizer, Any]]:
    """The two trained tokenizers, each with Hugging Face's tokenizer of its files."""
    saved = []
    for textmill in (tokenizer, custom_tokenizer):
        directory = tmp_path_factory.mktemp("tokenizer")
        textmill.save(directory)
        saved.append((textmill, hugging_face(directory)))
    return saved


@examples(200)
@given(stable_text)
def test_hugging_face_encodes_any_text_the_same(tokenizer_pairs: list[tuple[Tokenizer, Any]], text: str) -> None:
    for textmill, hf_tokenizer in tokenizer_pairs:
        ids = textmill.encode(text)
        assert hf_tokenizer.encode(text).ids == ids
        if "é!" not in text:  # Hugging Face maps characters of special tokens to bytes when it decodes
            assert hf_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_hugging_face_encodes_stories_the_same(tokenizer_pairs: list[tuple[Tokenizer, Any]]) -> None:
    text = "".join(demo_stories(300, seed=1))
    for textmill, hf_tokenizer in tokenizer_pairs:
        assert hf_tokenizer.encode(text).ids == textmill.encode(text)


def test_hugging_face_encodes_added_special_tokens_the_same(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(["<s>", "日本"])
    tokenizer.save(tmp_path)
    text = "a<s>b 日本 é"
    assert hugging_face(tmp_path).encode(text).ids == tokenizer.encode(text)


@pytest.fixture(scope="module")
def tiktoken_gpt2(shared_data: Path) -> Any:
    """tiktoken's GPT-2 encoder, made without ``lm.tokenizer.formats.vocab_merges``."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    token_ids = json.loads((shared_data / "gpt2_vocab.json").read_text(encoding="utf-8"))
    end_of_text = token_ids.pop(END_OF_TEXT)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={bytes(map(byte_of.__getitem__, text)): rank for text, rank in token_ids.items()},
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


@examples(500)
@given(stable_text | st.text(stable_characters, max_size=60))
def test_gpt2_equals_tiktoken_on_any_text(gpt2: Tokenizer, tiktoken_gpt2: Any, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode(text, allowed_special="all")
    assert gpt2.encode(text, allowed_special=()) == tiktoken_gpt2.encode_ordinary(text)


@examples(200)
@given(st.text("a1 \n\t'sdmtlverS\u00a0\u3000\x1c\x85!é", max_size=40))
def test_gpt2_equals_tiktoken_on_contractions_and_white_space(gpt2: Tokenizer, tiktoken_gpt2: Any, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


def test_gpt2_files_are_written_unchanged(gpt2: Tokenizer, shared_data: Path, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    assert (tmp_path / "merges.txt").read_bytes().rstrip() == (shared_data / "gpt2_merges.txt").read_bytes().rstrip()
    textmill = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    assert textmill == json.loads((shared_data / "gpt2_vocab.json").read_text(encoding="utf-8"))


@given(st.text(stable_characters, max_size=60))
@examples(100)
def test_a_trained_tokenizer_equals_tiktoken(text: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    counts = [(word.encode(), 9 - i) for i, word in enumerate((" the", " then", " other", "ing", "123", "…", " don"))]
    vocab, merges = train_merges(counts_table(dict(counts)), 290, [END_OF_TEXT])
    ranks = {token: token_id for token_id, token in vocab.items() if token_id != 256}
    encoding = tiktoken.Encoding(
        "trained", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
    )
    text += " the other thing, don't 123" + END_OF_TEXT + text
    assert Tokenizer(vocab, merges, [END_OF_TEXT]).encode(text) == encoding.encode(text, allowed_special="all")


@pytest.fixture(scope="module")
def tiktoken_pairs() -> dict[str, tuple[Tokenizer, Any]]:
    """Tokenizers by the name of their pattern, each with tiktoken's encoder of the same ranks."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    pairs = {}
    for name, pattern in PATTERNS.items():
        textmill = make_tokenizer(pattern, [END_OF_TEXT])
        ranks = {token: token_id for token_id, token in textmill.vocab.items() if token_id != 256}
        pairs[name] = (
            textmill,
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}),
        )
    return pairs


@examples(500)
@given(
    st.sampled_from(list(PATTERNS)),
    stable_text | st.text("a1 \n\r\t'sdmtlverSLſ\u00a0\u3000\x1c\x85!“é", max_size=60),
)
def test_each_pattern_equals_tiktoken(tiktoken_pairs: dict[str, tuple[Tokenizer, Any]], name: str, text: str) -> None:
    textmill, encoding = tiktoken_pairs[name]
    assert textmill.encode(text, allowed_special=()) == encoding.encode_ordinary(text)


def test_each_pattern_equals_hugging_face_on_stories(
    tiktoken_pairs: dict[str, tuple[Tokenizer, Any]], tmp_path: Path
) -> None:
    text = "".join(demo_stories(100, seed=2)) + "\n\n  IT'S 12345 \r\n\n x!\n\n“He'LL” go  \n"
    for name, (textmill, _) in tiktoken_pairs.items():
        textmill.save(tmp_path / name)
        assert hugging_face(tmp_path / name).encode(text).ids == textmill.encode(text)
        loaded = Tokenizer.load(tmp_path / name)
        assert loaded.pattern == PATTERNS[name] and loaded._fast_encoder is not None
        assert Tokenizer.from_tokenizer_json(tmp_path / name / "tokenizer.json").encode(text) == textmill.encode(text)
