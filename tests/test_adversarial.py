"""Texts and pretokens that are hard on the tables, the merges and the windows: the ids are still the reference's."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm import encoder
from lm.bpe import train_merges
from lm.counts import count_pretokens
from lm.kernels import count as count_kernels
from lm.kernels.table import key_of
from lm.kernels.walk import AT
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer import Tokenizer
from tests.test_chunks import count_of, counter_of
from tests.test_tokenizer import naive_encode
from tests.tokenizers_made import SPECIALS, counts_table, make_tokenizer

SIZE = 300_000  # bytes, about, of a text
LENGTHS = [1, 7, 8, 9, 14, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 1022, 1023, 1024, 1025, 1026, 2047, 2049]


def trained(words: Sequence[str], merges: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with merges of these pretokens."""
    vocab, learned = train_merges(counts_table(Counter(words)), 256 + len(special_tokens) + merges, special_tokens)
    return Tokenizer(vocab, learned, list(special_tokens))


def wide(tokenizer: Tokenizer) -> Tokenizer:
    """The same with ids past 65,536."""
    vocab = {70_000 + token_id: token for token_id, token in tokenizer.vocab.items()}
    return Tokenizer(vocab, tokenizer.merges, tokenizer.special_tokens)


@pytest.fixture(scope="module")
def few_letters() -> Tokenizer:
    """Merges of runs, pairs and mixtures of two letters, long ones too."""
    source = random.Random(3)
    words = ["".join(source.choices("ab", weights=(3, source.choice([1, 3])), k=60)) for _ in range(300)]
    return trained([*words, *["a" * 70] * 20, *["ab" * 40] * 20, *["aab" * 30] * 20], 250)


# pretokens


def tiny(tokenizer: Tokenizer, slots: int, arena: int) -> Tokenizer:
    """A tokenizer of the same ids whose memory of pretokens is full at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.encoder._SLOTS", slots)
        patch.setattr("lm.encoder._ARENA", arena)
        made = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
        made.encode("a")  # takes its memory now, and keeps it
    return made


@pytest.fixture(scope="module")
def full(tokenizer: Tokenizer) -> list[Tokenizer]:
    sizes = [(16, 64), (2, 64), (16, 0), (1 << 12, 64), (16, 1 << 16)]
    return [tiny(made, *size) for made in (tokenizer, wide(tokenizer)) for size in sizes]


some_words = st.lists(
    st.sampled_from([" the", " Once upon", "日本語", END_OF_TEXT, " "]) | st.text("aeo", max_size=40), max_size=60
)


@settings(deadline=None, max_examples=100)
@given(some_words.map("".join))
def test_a_full_memory_of_pretokens_changes_no_id(full: list[Tokenizer], text: str) -> None:
    for tokenizer in full:
        expected = tokenizer.encode_reference(text, SPECIALS)
        assert tokenizer.encode(text) == expected
        assert tokenizer.encode(text) == expected


@pytest.mark.parametrize("fill", ["a", "ab", "aab", "\x00", "é", "日", "!?", "7"])
def test_pretokens_of_lengths_around_the_limits(few_letters: Tokenizer, fill: str) -> None:
    pretokens = [(fill * length).encode()[: length - length % len(fill[0].encode())].decode() for length in LENGTHS]
    order = [*pretokens, *pretokens[::-1], *pretokens]
    text = "\n".join(order)
    for tokenizer in (few_letters, wide(few_letters), tiny(few_letters, 16, 1100)):
        expected = [tokenizer.encode_reference(pretoken, []) for pretoken in order]
        [newline] = tokenizer.encode("\n")
        joined = [token_id for ids in expected for token_id in (*ids, newline)][:-1]
        assert tokenizer.encode(text) == joined
        assert tokenizer.encode(text) == joined
    assert counter_of(count_pretokens([[text.encode()]], [])) == count_of(text, [], GPT2_PATTERN)


@pytest.mark.parametrize("start", ["!", "!" * 7, "!" * 13, "!" * 15, "!" * 16, "!" * 31])
def test_pretokens_that_differ_in_nul_bytes_at_the_end(tokenizer: Tokenizer, start: str) -> None:
    pretokens = [start + "\x00" * zeros for zeros in range(20)]
    text = " ".join([*pretokens, *pretokens[::-1], *["\x00" * zeros for zeros in range(1, 40)]])
    assert tokenizer.encode(text) == tokenizer.encode_reference(text, SPECIALS)
    assert counter_of(count_pretokens([[text.encode()]], [])) == count_of(text, [], GPT2_PATTERN)


def test_pretokens_with_the_same_hash_are_told_apart(tokenizer: Tokenizer) -> None:
    """Made for this hash: with another one, other words are needed."""
    words = ["abcdefghijklmnop", "npdhKuWAVURJBpHg", "FxbJSVDBEZuicqGl", "SlhGXevTjCkstxcv"]
    words = [word + "qrstuvwx" for word in words]
    keys = {key_of(np.frombuffer(word.encode() + b"\0" * 64, np.uint8).copy(), 0, 24) for word in words}
    assert len(keys) == 1
    text = "\n".join([*words, *words[::-1], *words[1:]])
    assert tokenizer.encode(text) == tokenizer.encode_reference(text, SPECIALS)
    assert counter_of(count_pretokens([[text.encode()]], [])) == count_of(text, [], GPT2_PATTERN)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=6), st.data())
def test_long_pretokens_of_two_letters(few_letters: Tokenizer, parts: list[str], data: st.DataObject) -> None:
    """Up to many hundred bytes, with runs and repetitions, by merges that were learned from such."""
    text = "".join(part * data.draw(st.integers(1, 40)) for part in parts)
    expected = naive_encode(few_letters, text, []) if len(text) < 400 else few_letters.encode_reference(text, [])
    assert few_letters.encode(text) == expected


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.text("ab", min_size=2, max_size=40), min_size=1, max_size=8),
    st.integers(0, 60),
    st.lists(st.text("ab", min_size=1, max_size=20), min_size=1, max_size=5),
    st.integers(1, 4000),
)
def test_any_merges_on_pretokens_of_many_blocks(words: list[str], merges: int, parts: list[str], size: int) -> None:
    """A pretoken is merged in blocks of about a thousand bytes: the ids are those of the whole."""
    tokenizer = trained(words, merges)
    for unit in ("".join(parts), parts[0], "a", "b" * 50 + parts[-1]):
        text = (unit * (size // len(unit) + 1))[:size]
        assert tokenizer.encode(text) == tokenizer.encode_reference(text, [])


def test_tokens_longer_than_a_block() -> None:
    """Runs that double to 4,096 letters: the end of a text decides over thousands of letters before it."""
    doubles = [b"a" * 2**i for i in range(13)]
    merges = [(token, token) for token in doubles[:-1]] + [(doubles[-1], b"b"), (b"b", doubles[5])]
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + [left + right for left, right in merges])
    tokenizer = Tokenizer(dict(enumerate(tokens)), merges)
    assert tokenizer._encoder is not None
    source = random.Random(1)
    lengths = [1023, 1024, 1025, 4095, 4096, 4097, 8191, 20_479, 20_480]
    texts = ["a" * length for length in lengths] + [
        "b".join("a" * source.choice([source.randrange(9000), 4096, 8192, 32]) for _ in range(6)) for _ in range(60)
    ]
    for text in texts:
        assert tokenizer.encode(text) == tokenizer.encode_reference(text, [])


# whole texts


def many(characters: str, size: int = SIZE, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(characters, k=size))


TEXTS: dict[str, Callable[[], str]] = {
    "one letter": lambda: "a" * SIZE,
    "alternating": lambda: "ab" * (SIZE // 2),
    "spaces": lambda: " " * SIZE,
    "newlines": lambda: "\n" * SIZE + "x",
    "white space": lambda: many(" \n\t\u3000\xa0", SIZE // 2),
    "no separator": lambda: many("abcdefghijklmnopqrstuvwxyz"),
    "unique pretokens": lambda: "".join(f" {many('abcdefgh', 11, i)}" for i in range(SIZE // 12)),
    "unique long pretokens": lambda: "".join(f" {many('abcdefgh', 1030, i)}" for i in range(SIZE // 1031)),
    "CJK": lambda: many("日本語の文章東京" + "".join(map(chr, range(0x4E00, 0x5000))), SIZE // 3),
    "emoji": lambda: many("🙂🙃👍🏽👩\u200d❤\ufe0f", SIZE // 4),
    "punctuation": lambda: many("'!?.<|>"),
    "contractions": lambda: many("'slvetrd"),
    "replaced bytes": lambda: random.Random(7).randbytes(SIZE // 2).decode(errors="replace"),
    "special tokens": lambda: "a".join([END_OF_TEXT * i for i in range(1, 4)] * (SIZE // 80)),
    "beginnings of special tokens": lambda: "<|endoftext|" * (SIZE // 12),
}


@pytest.fixture(scope="module", params=TEXTS)
def text(request: pytest.FixtureRequest) -> str:
    return TEXTS[request.param]()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes handed to the kernels that encode and count, in this order: ``[0, 0]`` to begin with."""
    found = [0, 0]

    def measured(kernel: Callable[..., Any], which: int) -> Callable[..., Any]:
        def call(buffer: Any, end: int, final: bool, cursor: Any, *rest: Any) -> Any:
            found[which] += end - int(cursor[AT])
            return kernel(buffer, end, final, cursor, *rest)

        return call

    monkeypatch.setattr(encoder, "encode", measured(encoder.encode, 0))
    monkeypatch.setattr(count_kernels, "count", measured(count_kernels.count, 1))
    yield found


def test_a_hard_text_is_encoded_and_counted_in_linear_work(
    tokenizer: Tokenizer, text: str, handed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the windows are, what was uncertain is looked at a few times at most."""
    data = text.encode()
    expected = tokenizer.encode_reference(text, SPECIALS)
    counts = count_of(text, SPECIALS, GPT2_PATTERN)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text
    for window in (1 << 10, 1 << 12, 1 << 16):
        monkeypatch.setattr("lm.buffers.windows.__defaults__", (window,))
        handed[:] = 0, 0
        blocks = [data[i : i + 4099] for i in range(0, len(data), 4099)]
        ids = [array.tolist() for array in tokenizer.encode_blocks(blocks, window=window)]
        assert [token_id for array in ids for token_id in array] == expected
        assert counter_of(count_pretokens([blocks], SPECIALS)) == counts
        assert len(data) <= handed[0] <= 5 * len(data)
        assert len(data) <= handed[1] <= 6 * len(data)


def test_a_new_tokenizer_gives_hard_texts_the_same_ids(text: str) -> None:
    """With ids of four bytes, a memory that knows nothing, and plain text for special tokens."""
    tokenizer = wide(make_tokenizer())
    expected = tokenizer.encode_reference(text, [])
    assert tokenizer.encode(text, allowed_special=()) == expected
    assert tokenizer.decode(expected) == text
