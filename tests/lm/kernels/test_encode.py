"""Token ids by the kernels equal the reference: special tokens, blocks, windows, and merges of any kind."""

import os
import random
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lm.common.errors import InvalidUtf8Error
from lm.kernels.disk_cache import CACHE_DIR
from lm.text.demo_corpus import demo_stories
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.kernels import OVERLAPPING_SPECIALS, PIECES, damaged_texts, expected_starts, hard_texts, patterns
from tests.helpers.naive_bpe import naive_encode
from tests.helpers.processes import PROJECT
from tests.helpers.tokenizers import SPECIALS, make_tokenizer

_PARTS = [*OVERLAPPING_SPECIALS, *PIECES, "<|end", "<s", "xx<s>y", "日本日本", "b" * 70]
_block_sizes = st.lists(st.integers(0, 40), max_size=8)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    """Tokenizers by pattern, with special tokens that are prefixes, suffixes and parts of each other."""
    return {pattern: make_tokenizer(pattern, OVERLAPPING_SPECIALS) for pattern in PATTERNS.values()}


@pytest.fixture(scope="module")
def overlapping(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """The tokenizer with GPT-2's pattern."""
    return tokenizers[PATTERNS["gpt2"]]


def split(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield blocks of these sizes, then the rest."""
    for size in sizes:
        yield data[:size]
        data = data[size:]
    yield data


def encode_blocks(tokenizer: Tokenizer, blocks: Iterator[bytes], allowed: Collection[str], window: int) -> list[int]:
    return [token_id for ids in tokenizer.encode_blocks(blocks, allowed, window) for token_id in ids.tolist()]


@examples(2000)
@given(
    patterns,
    st.lists(st.sampled_from(_PARTS), max_size=25).map("".join) | hard_texts,
    st.sets(st.sampled_from(OVERLAPPING_SPECIALS)),
    _block_sizes,
    st.integers(1, 150),
)
# The window ends at the end of the shorter special token, or inside the special token that starts earlier.
@example(PATTERNS["gpt2"], "abcde<s>b", {"<s>", "<s>b"}, [], 8)
@example(PATTERNS["gpt2"], "abcdexx<s>yy", {"<s>", "xx<s>yy"}, [], 10)
def test_blocks_and_windows_do_not_change_the_ids(
    tokenizers: dict[str, Tokenizer], pattern: str, text: str, allowed: set[str], sizes: list[int], window: int
) -> None:
    tokenizer = tokenizers[pattern]
    expected = tokenizer.encode_reference(text, [token for token in OVERLAPPING_SPECIALS if token in allowed])
    assert tokenizer.encode(text, allowed) == expected
    assert encode_blocks(tokenizer, split(text.encode(), sizes), allowed, window) == expected


NESTED_SPECIALS = ["".join(letters) for n in range(1, 6) for letters in product("ab", repeat=n) if letters[-1] == "a"]


@pytest.fixture(scope="module")
def nested() -> Tokenizer:
    return make_tokenizer(special_tokens=NESTED_SPECIALS, merges=20)


@examples(300)
@given(st.text("abc", max_size=150), st.sets(st.sampled_from(NESTED_SPECIALS)), st.integers(1, 150))
def test_the_longest_of_many_special_tokens_that_begin_with_one_another(
    nested: Tokenizer, text: str, allowed: set[str], window: int
) -> None:
    expected = nested.encode_reference(text, allowed)
    assert nested.encode(text, allowed) == expected
    assert encode_blocks(nested, iter([text.encode()]), allowed, window) == expected


@examples(300)
@given(damaged_texts, _block_sizes, st.integers(1, 150))
def test_invalid_utf8_raises_an_error_with_its_offset(
    overlapping: Tokenizer, data: bytes, sizes: list[int], window: int
) -> None:
    offset = expected_starts(data)
    if not isinstance(offset, int):
        assert encode_blocks(overlapping, split(data, sizes), "all", window) == overlapping.encode(data.decode())
        return
    with pytest.raises(
        InvalidUtf8Error, match=rf"not UTF-8: byte 0x{data[offset]:02x} at offset {offset:,}\."
    ) as caught:
        encode_blocks(overlapping, split(data, sizes), "all", window)
    assert (caught.value.offset, caught.value.byte) == (offset, data[offset])
    assert overlapping.encode("one two") == overlapping.encode_reference("one two", OVERLAPPING_SPECIALS)  # still works


@pytest.mark.slow
def test_windows_that_end_beside_a_special_token() -> None:
    """No pretoken is certain at the end of such a window. Runs in a process, because a bug would loop forever."""
    code = """
from lm.tokenizer.pretoken_counts import count_pretokens
from tests.helpers.tokenizers import bytes_tokenizer
tokenizer = bytes_tokenizer(["<s>"])
assert list(tokenizer.encode_iterable(["word<s>"] * 200_000)) == [*b"word", 256] * 200_000
[counts] = count_pretokens([[b"word<s>" * 3_000_000]], ["<s>"])
assert counts.to_pydict() == {"pretoken": [b"word"], "count": [3_000_000]}
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(CACHE_DIR.parents[2])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PROJECT, env=environment, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def random_texts(count: int) -> list[str]:
    """Return texts of characters of all planes; in half of them most characters matter to the pattern."""
    source = random.Random(5)
    pieces = [*PIECES, "the", " and", " a", "ab", "\n\n"]

    def random_piece(is_hard: bool) -> str:
        if is_hard and source.random() < 0.8:
            return source.choice(pieces)
        point = source.randrange(0x110000)
        return chr(point if not 0xD800 <= point < 0xE000 else source.randrange(0x3000))

    return ["".join(random_piece(i % 2 == 0) for _ in range(source.randrange(1, 20))) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", *(pytest.param(name, marks=pytest.mark.long) for name in PATTERNS)])
def test_ids_equal_the_reference_on_many_texts(request: pytest.FixtureRequest, name: str) -> None:
    if name == "gpt2":
        tokenizer = request.getfixturevalue("gpt2")
    else:
        tokenizer = make_tokenizer(PATTERNS.get(name, GPT2_PATTERN), special_tokens=[END_OF_TEXT])
    assert tokenizer._fast_encoder is not None
    texts = random_texts(25_000 if name == "demo" else 100_000)
    ids = tokenizer.encode("".join(text + END_OF_TEXT for text in texts))
    end_id = tokenizer.special_ids[END_OF_TEXT]
    start = 0
    for text in texts:
        expected = [*tokenizer.encode_reference(text, []), end_id]
        assert ids[start : start + len(expected)] == expected, text
        start += len(expected)
    assert start == len(ids)


@pytest.mark.parametrize("first", [0, 65_536 - 660, 65_537 - 660, 65_537, (1 << 24) - 660])
def test_ids_in_any_order_and_of_any_size(tokenizer: Tokenizer, first: int) -> None:
    """uint16 up to id 65,535, then uint32."""
    assert tokenizer.size == 660
    ids = random.Random(first).sample(range(first, first + 660), 660)
    vocab = {ids[token_id]: token for token_id, token in tokenizer.vocab.items()}
    other = Tokenizer(vocab, tokenizer.merges, tokenizer.special_tokens)
    assert other._fast_encoder is not None
    [array] = other.encode_blocks([b"one"])
    assert array.dtype == (np.uint16 if first + 660 <= 1 << 16 else np.uint32)
    for text in ["".join(demo_stories(30)), "".join(random_texts(2000)), " Once" * 5, "".join(SPECIALS) * 3]:
        for _ in range(2):  # the second time from the cache of pretokens
            encoded = other.encode(text)
            assert encoded == [ids[token_id] for token_id in tokenizer.encode(text)]
            assert encoded == other.encode_reference(text, SPECIALS)


@pytest.mark.parametrize(
    ("merges", "text"),
    [
        ([(b"a", b"a"), (b"aa", b"b"), (b"a", b"b"), (b"a", b"ab"), (b"aab", b"c")], "aabc"),  # two merges make aab
        ([(b"a", b"b"), (b"b", b"c"), (b"a", b"b")], "abc"),  # the same merge twice
    ],
)
def test_a_token_made_by_two_merges(merges: list[tuple[bytes, bytes]], text: str) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    tokenizer = Tokenizer(dict(enumerate(dict.fromkeys(tokens))), merges)
    assert tokenizer._fast_encoder is not None
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])


@examples(200)
@given(st.data(), st.text("ab", max_size=80))
def test_merges_in_any_order(data: st.DataObject, text: str) -> None:
    """Also of parts that are made later or never, and of a token made before.

    Short pretokens, and those of several blocks.
    """
    tokens = [b"a", b"b", b"aab"]
    merges: list[tuple[bytes, bytes]] = []
    for _ in range(data.draw(st.integers(0, 8))):
        pair = (data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens)))
        if pair not in merges:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    merges = data.draw(st.permutations(merges) | st.just(merges))
    vocab = dict(enumerate(dict.fromkeys([bytes([byte]) for byte in range(256)] + tokens)))
    tokenizer = Tokenizer(vocab, merges)
    assert tokenizer._fast_encoder is not None
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])
    for length in (100, 5000):
        repeated = (text * length)[:length]
        assert tokenizer.encode(repeated) == tokenizer.encode_reference(repeated, [])
