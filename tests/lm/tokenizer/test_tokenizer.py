"""Encoding and decoding: equal to the naive reference, special tokens, invalid arguments."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.naive_bpe import naive_encode
from tests.helpers.pretoken_counts import counts_table
from tests.helpers.tokenizers import SPECIALS, bytes_tokenizer, text_fragments

any_text = st.lists(text_fragments | st.text(max_size=8), max_size=12).map("".join) | st.text()


@examples(300)
@given(any_text)
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, allowed_special=())) == text


@examples(100)
@given(any_text)
def test_decode_inverts_encode_with_a_custom_pattern(custom_tokenizer: Tokenizer, text: str) -> None:
    assert custom_tokenizer.decode(custom_tokenizer.encode(text)) == text


@examples(300)
@given(any_text)
def test_encode_equals_the_naive_reference(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, SPECIALS)
    assert tokenizer.encode(text, allowed_special=()) == naive_encode(tokenizer, text, [])
    assert custom_tokenizer.encode(text) == naive_encode(custom_tokenizer, text, SPECIALS)


@examples(100)
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=12), st.text("ab ", max_size=60))
def test_encode_equals_the_naive_reference_with_any_merges(words: list[str], text: str) -> None:
    """Merges of two letters: in runs such as ``aaaa`` the order of the merges matters."""
    vocab, merges = train_merges(counts_table(Counter(words)), 300, [])
    tokenizer = Tokenizer(vocab, merges)
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])


def test_the_handout_example() -> None:
    """CS336 assignment 1, section 2.6.1."""
    tokens = [b" ", b"a", b"c", b"e", b"h", b"t", b"th", b" c", b" a", b"the", b" at"]
    rest = [bytes([byte]) for byte in range(256) if bytes([byte]) not in tokens]
    merges = [(b"t", b"h"), (b" ", b"c"), (b" ", b"a"), (b"th", b"e"), (b" a", b"t")]
    tokenizer = Tokenizer(dict(enumerate(tokens + rest)), merges)
    assert tokenizer.encode("the cat ate") == [9, 7, 1, 5, 10, 3]


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b \udfff")) == "a\ufffdb \ufffd"
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")


def test_one_pretoken_of_200_000_letters() -> None:
    """The merges double a run up to 64 letters, so leftmost first gives 3,125 tokens of 64."""
    doubles = [b"a" * 2**i for i in range(7)]
    vocab = {i: bytes([i]) for i in range(256)} | {255 + i: token for i, token in enumerate(doubles) if i}
    tokenizer = Tokenizer(vocab, [(token, token) for token in doubles[:-1]])
    assert tokenizer.encode("a" * 200_000) == [255 + 6] * (200_000 // 64)


# encode_iterable


@examples(200)
@given(st.lists(any_text, max_size=6))
def test_encode_iterable_equals_encode_of_the_whole(
    tokenizer: Tokenizer, custom_tokenizer: Tokenizer, blocks: list[str]
) -> None:
    assert list(tokenizer.encode_iterable(blocks)) == tokenizer.encode("".join(blocks))
    assert list(custom_tokenizer.encode_iterable(blocks)) == custom_tokenizer.encode("".join(blocks))


@examples(30)
@given(st.integers(1, 9000), st.integers(0, 5000))
def test_encode_iterable_equals_encode_on_long_text(tokenizer: Tokenizer, size: int, start: int) -> None:
    text = "".join(demo_stories(60))[start:]
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(tokenizer.encode_iterable(blocks)) == tokenizer.encode(text)


def test_encode_iterable_is_lazy(tokenizer: Tokenizer) -> None:
    texts_read = 0

    def endless() -> Iterator[str]:
        nonlocal texts_read
        while True:
            texts_read += 1
            yield "Once upon a time. "

    ids = list(itertools.islice(tokenizer.encode_iterable(endless()), 10_000))
    assert ids == tokenizer.encode("Once upon a time. " * 10_000)[:10_000]
    assert texts_read < 10_000


def test_encode_iterable_takes_an_open_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n\nthree<|endoftext|>\n")
    with path.open() as file:
        assert list(tokenizer.encode_iterable(file)) == tokenizer.encode("one\ntwo\n\nthree<|endoftext|>\n")


def test_encode_iterable_of_nothing(tokenizer: Tokenizer) -> None:
    assert list(tokenizer.encode_iterable([])) == []
    assert list(tokenizer.encode_iterable(["", ""])) == []


# special tokens


def test_the_longest_of_overlapping_special_tokens_wins(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.special_ids[END_OF_TEXT], tokenizer.special_ids[END_OF_TEXT * 2]
    assert tokenizer.encode(END_OF_TEXT) == [one]
    assert tokenizer.encode(END_OF_TEXT * 2) == [two]
    assert tokenizer.encode(END_OF_TEXT * 3) == [two, one]


def test_missing_special_tokens_are_appended() -> None:
    tokenizer = bytes_tokenizer(["<s>", "a", "<t>"])
    assert tokenizer.special_ids == {"<s>": 256, "a": ord("a"), "<t>": 257}
    assert tokenizer.size == 258
    assert tokenizer.encode("<t>b<s>") == [257, ord("b"), 256]
    assert tokenizer.decode([256, 257]) == "<s><t>"


def test_the_vocab_argument_is_not_modified() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    Tokenizer(vocab, [], ["<s>"])
    assert len(vocab) == 256


def test_special_tokens_that_are_not_allowed_are_plain_text(tokenizer: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b<|a b|>"
    plain = tokenizer.encode(text, allowed_special=())
    assert not set(plain) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(plain) == text
    some = tokenizer.encode(text, allowed_special={"<|a b|>"})
    assert tokenizer.special_ids["<|a b|>"] in some
    assert tokenizer.special_ids[END_OF_TEXT] not in some
    assert tokenizer.encode(text, allowed_special=SPECIALS) == tokenizer.encode(text)


def test_an_unknown_allowed_special_token_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="'<x>' is not a special token"):
        tokenizer.encode("a", allowed_special=["<x>"])


@pytest.mark.parametrize("special_tokens", [["<s>", "<s>"], [""], ["\ud800"]])
def test_invalid_special_tokens_are_rejected(special_tokens: list[str]) -> None:
    with pytest.raises(UserError, match=r"[Ss]pecial token"):
        bytes_tokenizer(special_tokens)


# decode


@pytest.mark.parametrize("token_id", [-1, 256, 10**9])
def test_decoding_an_unknown_id_is_rejected(token_id: int) -> None:
    with pytest.raises(UserError, match=f"Token id {token_id} is not in the vocabulary of 256"):
        bytes_tokenizer().decode([65, token_id])


@examples(100)
@given(st.binary(max_size=20))
def test_bytes_that_are_not_utf8_decode_to_the_replacement_character(data: bytes) -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.decode(data) == data.decode("utf-8", "replace")
    assert tokenizer.decode(data, errors="ignore") == data.decode("utf-8", "ignore")
    assert tokenizer.decode_bytes(data) == data


def test_decode_takes_any_iterable_of_ids() -> None:
    assert bytes_tokenizer().decode(iter([72, 105])) == "Hi"
    assert bytes_tokenizer().decode([]) == ""


def test_more_merges_than_the_compiled_encoder_supports_are_said(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lm.tokenizer.fast_encoder.MAX_MERGES", 10)
    large = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
    assert large.encode("Once upon a time") == tokenizer.encode("Once upon a time")
    [message] = [record.getMessage() for record in caplog.records if record.name == "lm.tokenizer.fast_encoder"]
    assert "merges. The compiled encoder supports 10; plain Python encodes the text" in message
    caplog.clear()
    Tokenizer(tokenizer.vocab, tokenizer.merges[:10], tokenizer.special_tokens)
    assert not caplog.records
