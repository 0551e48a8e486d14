"""Superwords: segments, encoding and training equal to the naive references and to Hugging Face's library."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lm.tokenizer.superwords
from lm.checkpoint.gguf.tokenizer_metadata import check_tokenizer
from lm.common.errors import InvalidUtf8Error, UserError
from lm.text.demo_corpus import demo_stories
from lm.text.patterns import MAX_SEGMENT_WORDS, PATTERNS, SEGMENT_PATTERNS, segment_pattern
from lm.text.pretokenize import END_OF_TEXT, pretokenize
from lm.tokenizer.bpe import Merges, train_merges
from lm.tokenizer.config import TokenizerConfig
from lm.tokenizer.formats.tokenizer_json import make_tokenizer_json, parse_pre_tokenizer
from lm.tokenizer.pretoken_counts import count_pretokens, sum_counts
from lm.tokenizer.superword_encoder import SuperwordEncoder
from lm.tokenizer.superwords import SuperwordTraining, keep_word_merges, train_superwords
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.naive_bpe import naive_encode, naive_superwords
from tests.helpers.pretoken_counts import counts_table, reference_counts

WORDS = [" of", " the", "the", " a", "a", "'s", "'LL", "'", "é", "\xa0", " \xa0", "\n", "  ", ".", "1", "日", "A"]
texts = st.lists(st.sampled_from([*WORDS, END_OF_TEXT, END_OF_TEXT[:-2], " longer than"]), max_size=80).map("".join)
patterns = st.sampled_from([*SEGMENT_PATTERNS])
SPECIALS = [END_OF_TEXT]
ALL_MERGES = [
    *[(b" ", b"a"), (b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"o", b"f"), (b" ", b"of"), (b"'", b"s")],
    *[(b"\xa0", b" "), (b" of", b" the"), (b"the", b"'s"), (b" of the", b" a"), (b"a", b"a"), (b"a", b" a")],
    *[(b"\xa9", b"'"), (b" a", b" a"), (b" a a", b" a"), (b".", b"."), (b"e", b" a")],
]


def tokenizer_of(merges: Merges, pattern: str) -> Tokenizer:
    tokens = [*(bytes([i]) for i in range(256)), *(token.encode() for token in SPECIALS)]
    tokens += [left + right for left, right in merges]
    return Tokenizer(dict(enumerate(tokens)), merges, SPECIALS, segment_pattern(PATTERNS[pattern]))


def first_merges(text: str, pattern: str, vocab_size: int = 275) -> Merges:
    counts = reference_counts(text, SPECIALS, PATTERNS[pattern])
    table = counts_table({pretoken.encode(): count for pretoken, count in counts.items()})
    return train_merges(table, vocab_size, SPECIALS)[1]


def train(text: str, merges: Merges, pattern: str, threads: int = 1, vocab_size: int = 300) -> SuperwordTraining:
    """Train on the documents of a text, each a part."""
    documents = [part.encode() for part in text.split(END_OF_TEXT)]
    pieces = [part + END_OF_TEXT.encode() for part in documents[:-1]] + documents[-1:]
    parts = [lambda piece=piece: [[piece[:7], piece[7:]]] for piece in pieces]
    return train_superwords(parts, merges, vocab_size, SPECIALS, PATTERNS[pattern], threads=threads)


def test_segments_are_words_in_a_row() -> None:
    text = "It's a dog, isn't it?\nYes it  is 12 of the-end"
    assert [*pretokenize(text, SEGMENT_PATTERNS["gpt2"])] == [
        *["It's a dog", ",", " isn't it", "?", "\n", "Yes it", " ", " is", " 12", " of the", "-", "end"]
    ]
    long = " word" * (MAX_SEGMENT_WORDS + 1)
    for pattern in SEGMENT_PATTERNS.values():
        assert [len(segment.split()) for segment in pretokenize(long, pattern)] == [MAX_SEGMENT_WORDS, 1]


@examples(400)
@given(texts, patterns, st.lists(st.sampled_from(ALL_MERGES), unique=True))
def test_the_encoder_equals_the_naive_one_for_any_merges(text: str, pattern: str, merges: Merges) -> None:
    """The merges are in any order: some cross words before others that do not, some never happen."""
    vocab = tokenizer_of(ALL_MERGES, pattern).vocab
    tokenizer = Tokenizer(vocab, merges, SPECIALS, SEGMENT_PATTERNS[pattern])
    assert isinstance(tokenizer._fast_encoder, SuperwordEncoder)
    expected = naive_encode(tokenizer, text, SPECIALS)
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_reference(text) == expected
    data = text.encode()
    for size in (1, 5):
        blocks = [data[i : i + size] for i in range(0, len(data), size)]
        pieces = [*tokenizer.encode_blocks(blocks, window=3), np.empty(0, np.uint16)]
        assert np.concatenate(pieces).tolist() == expected


@pytest.mark.slow
@examples(200)
@given(texts, patterns, st.integers(1, 2), st.sampled_from([1 << 22, 60, 20, 10]))
def test_training_equals_the_naive_one(text: str, pattern: str, threads: int, share: int) -> None:
    merges = first_merges(text, pattern)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.tokenizer.superwords, "_TOKENS_PER_OCCURRENCE", share)
        learned = train(text, merges, pattern, threads)
    kept = keep_word_merges(merges)
    max_merges = 300 - 257 - len(kept)
    assert learned.merges == naive_superwords(text, kept, max_merges, SPECIALS, SEGMENT_PATTERNS[pattern], share)
    assert learned.vocab[len(learned.vocab) - 1] == (
        b"".join(learned.merges[-1]) if learned.merges else b"<|endoftext|>"
    )


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    text = "".join(demo_stories(300))
    merges = first_merges(text, "gpt2", 500)
    return tokenizer_of(train(text, merges, "gpt2", 2, 700).merges, "gpt2")


def test_superwords_are_learned_and_save_tokens(trained: Tokenizer) -> None:
    text = "".join([*demo_stories(310)][300:])
    plain = tokenizer_of(first_merges("".join(demo_stories(300)), "gpt2", 700), "gpt2")
    assert max(token.count(b" ") for token in trained.vocab.values()) > 2
    assert trained.size == plain.size
    assert len(trained.encode(text)) < 0.8 * len(plain.encode(text))
    assert trained.decode(trained.encode(text)) == text


def test_all_formats_keep_the_ids(trained: Tokenizer, tmp_path: Path) -> None:
    text = "".join(demo_stories(3)) + "It's of the\xa0 end, 12 or so of THE one's"
    expected = naive_encode(trained, text, SPECIALS)
    trained.save(tmp_path)
    trained.save_tiktoken(tmp_path / "ranks.tiktoken")
    pattern = SEGMENT_PATTERNS["gpt2"]
    special_ids = trained.special_ids
    for loaded in (
        Tokenizer.load(tmp_path),
        Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json"),
        Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt", SPECIALS, pattern),
        Tokenizer.from_tiktoken(tmp_path / "ranks.tiktoken", special_ids, pattern),
    ):
        assert loaded.pattern == pattern
        assert isinstance(loaded._fast_encoder, SuperwordEncoder)
        assert loaded.encode(text) == expected


@examples(100)
@given(texts, patterns)
def test_the_tokenizer_json_encodes_the_same_in_hugging_face(text: str, pattern: str) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    tokenizer = tokenizer_of(train(text, first_merges(text, pattern), pattern).merges, pattern)
    content = make_tokenizer_json(tokenizer.parts)
    assert parse_pre_tokenizer(content["pre_tokenizer"]["pretokenizers"]) == tokenizer.pattern
    other = hf.Tokenizer.from_str(json.dumps(content))
    assert other.encode(text).ids == tokenizer.encode(text) == naive_encode(tokenizer, text, SPECIALS)


def test_a_long_segment_is_merged_from_its_bytes(trained: Tokenizer) -> None:
    text = " ".join(["onceuponatime" * 200] * 20) + " once upon a time"
    assert trained.encode(text) == trained.encode_reference(text)


def test_a_segment_longer_than_the_workspace_of_words_has_long_tokens() -> None:
    """Each word is shorter than the workspace, a pair of them with the space is not."""
    sizes = [1 << power for power in range(14)]
    merges = [(b"a" * size, b"a" * size) for size in sizes[:-1]]
    long = b"a" * sizes[-1]
    tokenizer = tokenizer_of([*merges, (b" ", long), (long, b" " + long)], "gpt2")
    assert isinstance(tokenizer._fast_encoder, SuperwordEncoder)
    text = " ".join([long.decode()] * 5 + ["xyz" * 40])
    ids = tokenizer.encode(text)
    both, second = tokenizer.size - 1, tokenizer.size - 2
    assert ids[:4] == [both, second, second, second] and tokenizer.decode(ids) == text and len(ids) == 4 + 121


def test_a_table_of_pieces_that_is_too_long_for_a_column_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(demo_stories(40))
    whole = train(text, first_merges(text, "gpt2"), "gpt2")
    monkeypatch.setattr("lm.tokenizer.pretoken_counts._MAX_COLUMN_BYTES", 64)
    parts = train(text, first_merges(text, "gpt2"), "gpt2")
    assert parts == whole and parts.pieces > 10


def test_too_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "of the end of the end of the end"
    monkeypatch.setattr(lm.tokenizer.superwords, "MAX_ENTRIES", 4)
    with pytest.raises(UserError, match=r"different pieces of text with [\d,]+ tokens are too many"):
        train(text, first_merges(text, "gpt2"), "gpt2")


def test_an_error_of_the_text_is_not_hidden() -> None:
    def broken() -> Iterator[list[bytes]]:
        yield [b"of the end"]
        raise IndexError("in the text")

    with pytest.raises(IndexError, match="in the text"):
        train_superwords([broken], [], 300, [], PATTERNS["gpt2"], threads=2)


def test_ignore_merges_is_encoded_by_plain_python(trained: Tokenizer) -> None:
    vocab = trained.vocab | {trained.size: b"Once upon a zebra"}
    tokenizer = Tokenizer(vocab, trained.merges, SPECIALS, trained.pattern, ignore_merges=True)
    assert tokenizer.encode("Once upon a zebra. Once upon a time") == tokenizer.encode_reference(
        "Once upon a zebra. Once upon a time"
    )
    assert tokenizer.encode("Once upon a zebra") == [trained.size]


def test_merges_that_cross_words_are_left_out_with_those_that_need_them() -> None:
    merges = [(b"\xc2", b"\xa0"), (b"\xc2\xa0", b" "), (b"\xc2\xa0 ", b" "), (b" ", b" "), (b"a", b"'"), (b"\n", b" ")]
    assert keep_word_merges(merges) == [(b"\xc2", b"\xa0"), (b" ", b" "), (b"\n", b" ")]


def test_segments_are_counted_like_pretokens_by_the_plain_way() -> None:
    """The pattern of segments has no scanner of its own."""
    text = b"of the end of the"
    table = sum_counts([*count_pretokens([[text]], [], SEGMENT_PATTERNS["gpt2"])])
    assert table.to_pydict() == {"pretoken": [text], "count": [1]}


def test_bad_input_is_named(trained: Tokenizer) -> None:
    def broken() -> Iterator[list[bytes]]:
        yield [b"of the \xff"]

    with pytest.raises(InvalidUtf8Error):
        train_superwords([broken], [], 300, SPECIALS, PATTERNS["gpt2"])
    with pytest.raises(InvalidUtf8Error):
        [*trained.encode_blocks([b"of the \xff end"])]
    with pytest.raises(UserError, match="does not work with the pattern o200k"):
        TokenizerConfig(vocab_size=400, superwords=10, pattern="o200k")
    with pytest.raises(UserError, match="'gpt2 with superwords' cannot be exported to GGUF"):
        check_tokenizer(trained, trained.size)
    with pytest.raises(UserError, match="superwords 144 is too large: a vocab_size of 400 leaves 143 merges"):
        TokenizerConfig(vocab_size=400, superwords=144)


def test_the_default_keeps_the_keys_of_older_outputs() -> None:
    assert "superwords" not in TokenizerConfig().identity
    assert TokenizerConfig(superwords=5).identity["superwords"] == 5
