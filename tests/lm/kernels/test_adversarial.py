"""Texts that are hard for the tables, the merges and the windows: ids and counts equal the reference."""

import functools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.kernels.bpe import count as count_kernels
from lm.kernels.bpe import pretoken_table
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer import fast_encoder
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.naive_bpe import naive_encode
from tests.helpers.pretoken_counts import counts_table, reference_counts, to_counter
from tests.helpers.tokenizers import SPECIALS, make_tokenizer

_TEXT_BYTES = 300_000  # about
_LENGTHS = [1, 7, 8, 9, 14, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 1022, 1023, 1024, 1025, 1026, 2047, 2049]


def train(words: Sequence[str], merges: int) -> Tokenizer:
    """Train a tokenizer on these pretokens."""
    return Tokenizer(*train_merges(counts_table(Counter(words)), 256 + merges, []))


def with_wide_ids(tokenizer: Tokenizer) -> Tokenizer:
    """Return the same tokenizer with ids above 65,535."""
    vocab = {70_000 + token_id: token for token_id, token in tokenizer.vocab.items()}
    return Tokenizer(vocab, tokenizer.merges, tokenizer.special_tokens)


def with_small_cache(tokenizer: Tokenizer, slots: int, arena_bytes: int) -> Tokenizer:
    """Return the same tokenizer with a small cache of pretokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.tokenizer.fast_encoder.MAX_CACHE_SLOTS", slots)
        patch.setattr("lm.tokenizer.fast_encoder._CACHE_ARENA_BYTES", arena_bytes)
        copy = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
        copy.encode("a")  # allocates the cache
    return copy


@pytest.fixture(scope="module")
def two_letters() -> Tokenizer:
    """Merges of runs, pairs and mixtures of two letters, some of them long."""
    source = random.Random(3)
    words = ["".join(source.choices("ab", weights=(3, source.choice([1, 3])), k=60)) for _ in range(300)]
    return train([*words, *["a" * 70] * 20, *["ab" * 40] * 20, *["aab" * 30] * 20], 250)


@pytest.fixture(scope="module")
def small_caches(tokenizer: Tokenizer) -> list[Tokenizer]:
    sizes = [(16, 64), (2, 64), (16, 0), (1 << 12, 64), (16, 1 << 16)]
    return [with_small_cache(one, *size) for one in (tokenizer, with_wide_ids(tokenizer)) for size in sizes]


_words = st.sampled_from([" the", " Once upon", "日本語", END_OF_TEXT, " "]) | st.text("aeo", max_size=40)


@examples(100)
@given(st.lists(_words, max_size=60).map("".join))
def test_a_full_cache_of_pretokens_does_not_change_ids(small_caches: list[Tokenizer], text: str) -> None:
    for tokenizer in small_caches:
        expected = tokenizer.encode_reference(text, SPECIALS)
        assert tokenizer.encode(text) == expected
        assert tokenizer.encode(text) == expected


@pytest.mark.parametrize("fill", ["a", "ab", "aab", "\x00", "é", "日", "!?", "7"])
def test_pretokens_of_lengths_around_the_limits(two_letters: Tokenizer, fill: str) -> None:
    pretokens = [(fill * length).encode()[: length - length % len(fill[0].encode())].decode() for length in _LENGTHS]
    order = [*pretokens, *pretokens[::-1], *pretokens]
    text = "\n".join(order)
    for tokenizer in (two_letters, with_wide_ids(two_letters), with_small_cache(two_letters, 16, 1100)):
        expected = [tokenizer.encode_reference(pretoken, []) for pretoken in order]
        [newline] = tokenizer.encode("\n")
        joined = [token_id for ids in expected for token_id in (*ids, newline)][:-1]
        assert tokenizer.encode(text) == joined
        assert tokenizer.encode(text) == joined
    assert to_counter(count_pretokens([[text.encode()]], [])) == reference_counts(text, [], GPT2_PATTERN)


def check_ids_and_counts(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer.encode_reference(text, SPECIALS)
    assert to_counter(count_pretokens([[text.encode()]], [])) == reference_counts(text, [], GPT2_PATTERN)


@pytest.mark.parametrize("start", ["!", "!" * 7, "!" * 13, "!" * 15, "!" * 16, "!" * 31])
def test_pretokens_that_differ_in_nul_bytes_at_the_end(tokenizer: Tokenizer, start: str) -> None:
    pretokens = [start + "\x00" * zeros for zeros in range(20)]
    check_ids_and_counts(
        tokenizer, " ".join([*pretokens, *pretokens[::-1], *["\x00" * zeros for zeros in range(1, 40)]])
    )


def test_pretokens_with_the_same_hash(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With these seeds all products are 0: every pretoken has the same home slot, every long one the same hash."""
    monkeypatch.setattr(pretoken_table, "_SEEDS", np.zeros(2, np.uint64))
    words = ["abcdefghijklmnop", "npdhKuWAVURJBpHg", "FxbJSVDBEZuicqGl", "SlhGXevTjCkstxcv", "a", "b", "abcdefgh"]
    words += [word + "qrstuvwx" for word in words[:4]]
    check_ids_and_counts(with_small_cache(tokenizer, 64, 1100), "\n".join([*words, *words[::-1], *words[1:]]))


_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def short_words_of_one_home_slot() -> list[str]:
    """Return words of eight letters that have one home slot of 1,048,576 if the hash is a product with ``_M1``."""
    letters = np.arange(ord("a"), ord("z") + 1, dtype=np.uint64)
    halves = functools.reduce(lambda words, _: (words[:, None] << np.uint64(8) | letters).ravel(), range(3), letters)
    products = np.sort(halves * _M1)
    order = np.argsort(halves * _M1)
    others = -((halves << np.uint64(32)) * _M1)  # a first half with a product of this or a little more fits
    places = np.searchsorted(products, others)
    is_near = (places < len(products)) & (products[places % len(products)] - others < np.uint64(1 << 44))
    words = halves[order[places[is_near]]] | halves[is_near] << np.uint64(32)
    return [word.tobytes().decode() for word in words]


def long_words_of_near_home_slots() -> list[str]:
    """Return words of 16 letters whose home slots are few if the hash is a chain of products with known numbers."""
    halves = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, (4_000_000, 16), np.uint8).view(np.uint64)
    low = np.full(len(halves), 16, np.uint64)
    for half in halves.T:
        low = (low ^ half) * _M1
        low ^= low >> np.uint64(29)
    low = (low ^ halves[:, 1]) * _M2
    low ^= low >> np.uint64(32)
    mixed = low * _M1 + np.array([0xFF << 56 | 16], np.uint64) * _M2
    return [word.tobytes().decode() for word in halves[mixed < np.uint64(1 << 56)]]


@pytest.mark.slow
@pytest.mark.parametrize("make_words", [short_words_of_one_home_slot, long_words_of_near_home_slots])
def test_no_text_is_made_whose_pretokens_share_a_home_slot(
    tokenizer: Tokenizer, make_words: Callable[[], list[str]]
) -> None:
    """With a hash of known numbers these texts took 10 to 100 times as long as others. Its seeds are random now."""
    words = make_words()[:100_000]
    source = random.Random(0)
    others = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=len(words[0]))) for _ in words]
    assert len(words) > 10_000

    def seconds(words: list[str], work: Callable[[bytes], object]) -> float:
        text = "\n".join(words).encode()
        started = time.thread_time()
        work(text)
        return time.thread_time() - started

    def count(text: bytes) -> object:
        return [table.num_rows for table in count_pretokens([[text]], [])]

    def encode(text: bytes) -> object:
        return list(Tokenizer(tokenizer.vocab, tokenizer.merges).encode_blocks([text]))

    for work in (count, encode):
        work(b"some text")  # compiles
        expected, taken = (min(seconds(texts, work) for _ in range(3)) for texts in (others, words))
        assert taken < 3 * expected + 0.02


@pytest.mark.slow
def test_the_seeds_differ_from_process_to_process() -> None:
    program = "from lm.kernels.bpe.pretoken_table import make_table; print(make_table(2, 0).seeds.tolist())"
    seeds = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert json.loads(seeds) != pretoken_table.make_table(2, 0).seeds.tolist()


@examples(300)
@given(st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=6), st.data())
def test_long_pretokens_of_two_letters(two_letters: Tokenizer, parts: list[str], data: st.DataObject) -> None:
    text = "".join(part * data.draw(st.integers(1, 40)) for part in parts)
    expected = naive_encode(two_letters, text, []) if len(text) < 400 else two_letters.encode_reference(text, [])
    assert two_letters.encode(text) == expected


@examples(100)
@given(
    st.lists(st.text("ab", min_size=2, max_size=40), min_size=1, max_size=8),
    st.integers(0, 60),
    st.lists(st.text("ab", min_size=1, max_size=20), min_size=1, max_size=5),
    st.integers(1, 4000),
)
def test_pretokens_of_several_blocks(words: list[str], merges: int, parts: list[str], size: int) -> None:
    """A long pretoken is merged in blocks; the ids are those of the whole."""
    tokenizer = train(words, merges)
    for unit in ("".join(parts), parts[0], "a", "b" * 50 + parts[-1]):
        text = (unit * (size // len(unit) + 1))[:size]
        assert tokenizer.encode(text) == tokenizer.encode_reference(text, [])


@pytest.mark.slow
def test_tokens_longer_than_a_block() -> None:
    """Tokens of up to 4,096 letters: the end of a text decides how thousands of letters before it merge."""
    powers = [b"a" * 2**i for i in range(13)]
    merges = [(token, token) for token in powers[:-1]] + [(powers[-1], b"b"), (b"b", powers[5])]
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + [left + right for left, right in merges])
    tokenizer = Tokenizer(dict(enumerate(tokens)), merges)
    assert tokenizer._fast_encoder is not None
    source = random.Random(1)
    lengths = [1023, 1024, 1025, 4095, 4096, 4097, 8191, 20_479, 20_480]
    texts = ["a" * length for length in lengths] + [
        "b".join("a" * source.choice([source.randrange(9000), 4096, 8192, 32]) for _ in range(6)) for _ in range(20)
    ]
    for text in texts:
        assert tokenizer.encode(text) == tokenizer.encode_reference(text, [])


def random_text(characters: str, length: int = _TEXT_BYTES, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(characters, k=length))


_TEXTS: dict[str, Callable[[], str]] = {
    "one letter": lambda: "a" * _TEXT_BYTES,
    "alternating": lambda: "ab" * (_TEXT_BYTES // 2),
    "spaces": lambda: " " * _TEXT_BYTES,
    "newlines": lambda: "\n" * _TEXT_BYTES + "x",
    "whitespace": lambda: random_text(" \n\t\u3000\xa0", _TEXT_BYTES // 2),
    "no separator": lambda: random_text("abcdefghijklmnopqrstuvwxyz"),
    "unique pretokens": lambda: "".join(f" {random_text('abcdefgh', 11, i)}" for i in range(_TEXT_BYTES // 12)),
    "unique long pretokens": lambda: "".join(
        f" {random_text('abcdefgh', 1030, i)}" for i in range(_TEXT_BYTES // 1031)
    ),
    "CJK": lambda: random_text("日本語の文章東京" + "".join(map(chr, range(0x4E00, 0x5000))), _TEXT_BYTES // 3),
    "emoji": lambda: random_text("🙂🙃👍🏽👩\u200d❤\ufe0f", _TEXT_BYTES // 4),
    "punctuation": lambda: random_text("'!?.<|>"),
    "contractions": lambda: random_text("'slvetrd"),
    "replaced bytes": lambda: random.Random(7).randbytes(_TEXT_BYTES // 2).decode(errors="replace"),
    "special tokens": lambda: "a".join([END_OF_TEXT * i for i in range(1, 4)] * (_TEXT_BYTES // 80)),
    "beginnings of special tokens": lambda: "<|endoftext|" * (_TEXT_BYTES // 12),
}


@pytest.fixture(scope="module", params=_TEXTS)
def text(request: pytest.FixtureRequest) -> str:
    return _TEXTS[request.param]()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of bytes passed to the kernels so far, by the kernel's name."""
    totals: dict[str, int] = {}

    def measure(module: Any, name: str, cursor_index: int) -> None:
        kernel = getattr(module, name)
        totals[name] = 0

        def call(*arguments: Any) -> Any:
            end, _, cursor = arguments[cursor_index - 2 : cursor_index + 1]
            totals[name] += end - int(cursor[0]["position"])
            return kernel(*arguments)

        monkeypatch.setattr(module, name, call)

    measure(fast_encoder, "encode", 4)
    measure(count_kernels, "count_pretokens", 3)
    return totals


@pytest.mark.slow
def test_hard_texts_are_encoded_and_counted_in_linear_time(
    tokenizer: Tokenizer, text: str, bytes_read: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncertain text is read a few times at most, whatever the windows are."""
    data = text.encode()
    expected = tokenizer.encode_reference(text, SPECIALS)
    counts = reference_counts(text, SPECIALS, GPT2_PATTERN)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text
    for window in (1 << 10, 1 << 12, 1 << 16):
        monkeypatch.setattr("lm.text.text_windows.text_windows.__defaults__", (window,))
        bytes_read.update(dict.fromkeys(bytes_read, 0))
        blocks = [data[i : i + 4099] for i in range(0, len(data), 4099)]
        ids = [array.tolist() for array in tokenizer.encode_blocks(blocks, window=window)]
        assert [token_id for array in ids for token_id in array] == expected
        assert to_counter(count_pretokens([blocks], SPECIALS)) == counts
        assert len(data) <= bytes_read["encode"] <= 5 * len(data)
        assert len(data) <= bytes_read["count_pretokens"] <= 6 * len(data)


@pytest.mark.slow
def test_hard_texts_with_wide_ids_and_an_empty_cache(text: str) -> None:
    tokenizer = with_wide_ids(make_tokenizer())
    expected = tokenizer.encode_reference(text, [])
    assert tokenizer.encode(text, allowed_special=()) == expected
    assert tokenizer.decode(expected) == text
