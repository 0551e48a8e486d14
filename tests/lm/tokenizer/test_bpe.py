"""BPE training: the textbook example, equal to the naive reference, vocabulary layout, invalid arguments."""

import gzip
import logging
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lm.kernels.bpe.training_state
import lm.tokenizer.bpe
from lm.common.errors import UserError
from lm.kernels.bpe.corpus import ENTRIES_PER_PRETOKEN, FIRST_LARGE_COUNT
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import GPT2_PATTERN
from lm.tokenizer.bpe import train_bpe, train_merges
from lm.tokenizer.config import TokenizerConfig
from tests.helpers.examples import examples
from tests.helpers.naive_bpe import naive_merges
from tests.helpers.pretoken_counts import counts_table, reference_counts

# CS336 assignment 1, section 2.4, after Sennrich et al. 2016.
TEXTBOOK = "low low low low low\nlower lower widest widest widest\nnewest newest newest newest newest newest\n"
TEXTBOOK_MERGES = [
    *[(b"s", b"t"), (b"e", b"st"), (b"o", b"w"), (b"l", b"ow"), (b"w", b"est"), (b"n", b"e")],
    *[(b"ne", b"west"), (b"w", b"i"), (b"wi", b"d"), (b"wid", b"est"), (b"low", b"e"), (b"lowe", b"r")],
]


def naive_train(text: str, vocab_size: int, special_tokens: list[str]) -> list[tuple[bytes, bytes]]:
    """Learn the merges of a text with :func:`naive_merges`."""
    counts = reference_counts(text, special_tokens, GPT2_PATTERN)
    counts_of_bytes = {pretoken.encode(): count for pretoken, count in counts.items()}
    return naive_merges(counts_of_bytes, vocab_size - 256 - len(special_tokens))


def test_the_textbook_example() -> None:
    counts = Counter(TEXTBOOK.encode().split())
    vocab, merges = train_merges(counts_table(counts), 256 + 1 + 12, ["<|endoftext|>"])
    assert merges == TEXTBOOK_MERGES
    assert vocab[256 + 1 + 12 - 1] == b"lower"


def test_the_textbook_example_from_a_file_with_its_pattern(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXTBOOK)
    _, merges = train_bpe(path, 256 + 6, [], pattern=r"\S+")
    # Each gap is a pretoken of one character, so it adds no pair.
    assert merges == TEXTBOOK_MERGES[:6]


def test_ties_go_to_the_greater_bytes_and_not_to_the_greater_id() -> None:
    """After the merge of a and b (id 256), (ab, c) and (x, y) tie. The bytes of x are greater, the id of ab is."""
    _, merges = train_merges(counts_table({b"abc": 2, b"ab": 1, b"xy": 2}), 256 + 2, [])
    assert merges == [(b"a", b"b"), (b"x", b"y")]
    # A prefix is less than a longer string.
    _, merges = train_merges(counts_table({b"ab": 3, b"abz": 2, b"az": 2}), 256 + 2, [])
    assert merges == [(b"a", b"b"), (b"ab", b"z")]


counts_of_few_letters = st.dictionaries(
    st.text("ab", max_size=12).map(str.encode) | st.text("abcé", max_size=8).map(str.encode) | st.binary(max_size=6),
    st.integers(1, 5) | st.integers(FIRST_LARGE_COUNT - 2, FIRST_LARGE_COUNT + 1) | st.just(2**40),
    max_size=12,
)


@examples(300)
@given(counts_of_few_letters, st.integers(0, 40))
def test_merges_equal_the_naive_reference(counts: dict[bytes, int], merges: int) -> None:
    expected = naive_merges(counts, merges)
    vocab, learned = train_merges(counts_table(counts), 256 + merges, [])
    assert learned == expected
    assert [vocab[256 + i] for i in range(len(learned))] == [left + right for left, right in expected]


@pytest.mark.slow
@examples(40)
@given(counts_of_few_letters)
def test_ids_of_32_bits_give_the_same_merges(counts: dict[bytes, int]) -> None:
    _, learned = train_merges(counts_table(counts), 1 << 17, [])
    assert learned == naive_merges(counts, 1 << 17)


def test_more_pairs_than_the_first_tables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    counts = counts_table({source.randbytes(30): 1 for _ in range(4_000)})
    expected = train_merges(counts, 3_000, [])
    monkeypatch.setattr(lm.kernels.bpe.training_state, "_FIRST_PAIR_CAPACITY", 1 << 8)
    assert train_merges(counts, 3_000, []) == expected


def test_too_many_pretokens_for_the_indices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm.tokenizer.bpe, "MAX_ENTRIES", 1 + 5 + 2 * ENTRIES_PER_PRETOKEN)
    assert train_merges(counts_table({b"abc": 1, b"de": 1}), 257, [])[1] == [(b"d", b"e")]
    with pytest.raises(UserError, match=r"3 different pretokens of 7 bytes are too many .* Raise tokenizer\.min_count"):
        train_merges(counts_table({b"abc": 1, b"de": 1, b"fg": 1}), 257, [])


@examples(50)
@given(st.text("ab \n'é<|>", max_size=200), st.integers(0, 30))
def test_training_on_a_file_equals_the_naive_reference(
    tmp_path_factory: pytest.TempPathFactory, text: str, merges: int
) -> None:
    path = tmp_path_factory.mktemp("bpe") / "corpus.txt"
    text += "<|end|>" + text
    path.write_text(text, encoding="utf-8", newline="")
    vocab_size = 256 + 2 + merges
    assert train_bpe(path, vocab_size, ["<|end|>", "<|"])[1] == naive_train(text, vocab_size, ["<|end|>", "<|"])


def test_training_on_the_demo_corpus_equals_the_naive_reference(tmp_path: Path) -> None:
    text = "".join(demo_stories(200))
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8", newline="")
    specials = ["<|endoftext|>"]
    assert train_bpe(path, 600, specials)[1] == naive_train(text, 600, specials)


def test_the_vocabulary_is_bytes_then_special_tokens_then_merges(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("aa aa<pad>aa")
    vocab, merges = train_bpe(str(path), 256 + 2 + 2, ["<|endoftext|>", "<pad>"])
    assert list(vocab) == list(range(260))
    assert [vocab[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [vocab[256], vocab[257]] == [b"<|endoftext|>", b"<pad>"]
    assert merges == [(b"a", b"a"), (b" ", b"aa")]
    assert [vocab[258], vocab[259]] == [b"aa", b" aa"]


def test_no_merge_crosses_or_enters_a_special_token(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("<|endoftext|>xy<|endoftext|>xy" * 50)
    _, merges = train_bpe(path, 300, ["<|endoftext|>"])
    assert merges == [(b"x", b"y")]


def test_training_stops_early_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("abc")
    with caplog.at_level(logging.WARNING):
        vocab, merges = train_bpe(path, 1000, [])
    assert merges == [(b"b", b"c"), (b"a", b"bc")]
    assert len(vocab) == 258
    assert "258" in caplog.text
    assert "1000" in caplog.text


def test_a_full_vocabulary_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("abc")
    train_bpe(path, 258, [])
    assert not caplog.records


def test_a_vocabulary_without_merges(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("some text")
    vocab, merges = train_bpe(path, 257, ["<s>"])
    assert (len(vocab), merges) == (257, [])


def test_a_too_small_vocab_size_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("some text")
    with pytest.raises(UserError, match=r"vocab_size 257 is too small: .* need 258"):
        train_bpe(path, 257, ["<s>", "<t>"])
    with pytest.raises(UserError, match="too small"):
        train_merges(counts_table({}), 255, [])
    with pytest.raises(UserError, match="too small"):
        TokenizerConfig(vocab_size=256)


@examples(300)
@given(counts_of_few_letters, st.integers(0, 40), st.integers(1, 15))
def test_pairs_below_min_frequency_are_not_merged(counts: dict[bytes, int], merges: int, min_frequency: int) -> None:
    _, learned = train_merges(counts_table(counts), 256 + merges, [], min_frequency)
    assert learned == naive_merges(counts, merges, min_frequency)


@pytest.mark.parametrize("min_frequency", [0, -1])
def test_a_min_frequency_below_one_is_rejected(tmp_path: Path, min_frequency: int) -> None:
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(UserError, match="min_frequency"):
        train_bpe(tmp_path / "text.txt", 300, [], min_frequency=min_frequency)
    with pytest.raises(UserError, match="min_frequency"):
        train_merges(counts_table({b"ab": 1}), 300, [], min_frequency)
    with pytest.raises(UserError, match="min_frequency"):
        TokenizerConfig(min_frequency=min_frequency)


@pytest.mark.parametrize(
    ("special_tokens", "message"), [(["<s>", "<s>"], "given twice"), ([""], "is empty"), (["\udc80"], "surrogate")]
)
def test_invalid_special_tokens_are_rejected(tmp_path: Path, special_tokens: list[str], message: str) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("some text")
    with pytest.raises(UserError, match=message):
        train_bpe(path, 300, special_tokens)
    with pytest.raises(UserError, match=message):
        TokenizerConfig(special_tokens=special_tokens)


@pytest.mark.parametrize("token", ["a", "\n", "§", "Ġ"])
def test_a_special_token_of_one_byte_is_refused_before_a_run(token: str) -> None:
    """The files of the trained tokenizer could not tell it from the byte."""
    with pytest.raises(UserError, match="is one byte, or stands for one"):
        TokenizerConfig(special_tokens=[token])


def test_a_pattern_that_cannot_be_saved_is_refused_before_a_run() -> None:
    with pytest.raises(UserError, match="cannot be exported"):
        TokenizerConfig(pattern=r"(?m)^\s+|\S+|\s+")


def test_a_malformed_pattern_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("some text")
    with pytest.raises(UserError, match="regular expression"):
        train_bpe(path, 300, [], pattern="(")
    with pytest.raises(UserError, match="regular expression"):
        TokenizerConfig(pattern="(")


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        train_bpe(tmp_path / "none.txt", 300, [])


def test_merges_stay_within_the_pretokens_of_a_custom_pattern(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("a1a1a1 a1")
    assert train_bpe(path, 257, [], pattern=r"\w+")[1] == [(b"a", b"1")]
    assert train_bpe(path, 257, [], pattern=GPT2_PATTERN)[1] == [(b" ", b"a")]


def test_compressed_input_trains_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "corpus.txt", tmp_path / "corpus.txt.gz"
    plain.write_text(TEXTBOOK)
    packed.write_bytes(gzip.compress(TEXTBOOK.encode()))
    assert train_bpe(packed, 270, []) == train_bpe(plain, 270, [])


def test_progress_counts_the_merges() -> None:
    progress: list[int] = []
    train_merges(counts_table({b"abcd": 1}), 258, [], progress=progress.append)
    assert progress == [1, 2]


def test_a_slow_kernel_call_is_shortened_and_a_long_training_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Signals are handled, and progress is shown, between two calls of the kernel only."""
    counts = {bytes([97 + i, 123]): 26 - i for i in range(26)}
    monkeypatch.setattr(lm.tokenizer.bpe, "_MAX_SECONDS_PER_CALL", -1)
    monkeypatch.setattr(lm.tokenizer.bpe, "_SECONDS_BETWEEN_LOG_LINES", 0)
    progress: list[int] = []
    with caplog.at_level(logging.INFO, "lm.tokenizer.bpe"):
        train_merges(counts_table(counts), 256 + 26, [], progress=progress.append)
    assert progress == [*range(1, 27)]
    assert caplog.messages[-1] == "Learned 26 of 26 merges."


@examples(50)
@given(st.lists(st.tuples(st.sampled_from(["a", "ab", "acgt", " "]), st.integers(900, 1200)), min_size=1), st.data())
def test_pretokens_around_and_above_the_length_whose_end_is_looked_up(
    parts: list[tuple[str, int]], data: st.DataObject
) -> None:
    source = random.Random(data.draw(st.integers(0, 9)))
    counts = {
        "".join(source.choices(letters, k=length)).encode(): data.draw(st.sampled_from([1, 3, FIRST_LARGE_COUNT]))
        for letters, length in parts
    }
    counts |= {b"abc": 2, b"gt" * 700: 1}
    _, merges = train_merges(counts_table(counts), 256 + 8, [])
    assert merges == naive_merges(counts, 8)


@pytest.mark.slow
@pytest.mark.parametrize("letters", [b"a", b"ACGT", b" ", b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+/"])
def test_the_time_grows_in_proportion_to_the_length_of_a_pretoken(letters: bytes) -> None:
    """A walk to the end of the pretoken at each place took 40 times as long for five times the text."""
    pretoken = np.random.default_rng(0).choice(np.frombuffer(letters, np.uint8), 1_000_000).tobytes()

    def seconds(pretoken: bytes) -> float:
        counts = counts_table({pretoken: 1})
        started = time.thread_time()
        train_merges(counts, 300, [])
        return time.thread_time() - started

    seconds(b"ab")  # compiles
    short, long = (min(seconds(pretoken[:size]) for _ in range(3)) for size in (200_000, 1_000_000))
    assert long < 10 * short + 0.1
