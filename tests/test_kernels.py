"""The compiled kernels against the slow, obvious way: where pretokens begin, special tokens, and ids."""

import os
import random
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.buffers import NotUtf8
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.kernels import CACHE
from lm.kernels.classes import character_classes
from lm.kernels.scan import scan
from lm.pretokens import END_OF_TEXT, pretokenize
from lm.tokenizer import Tokenizer
from tests.test_tokenizer import naive_encode
from tests.tokenizers_made import SPECIALS, make_tokenizer

BLOCK = 64  # bytes that the scan looks at at once

letters = ["a", "s", "ll", "é", "日", "𝒳", "ª"]
digits = ["1", "٣", "Ⅷ", "𝟗", "½"]
blanks = [" ", "  ", "\n", "\t ", "\r\n", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u3000", " \u3000"]
others = ["'", "'s", "'ll", "'ve", "'re", "'d", "'l", "'S", "''", "!", "\x1c", "\x1f", "\u0301", "🙂", "\u200b", "\x00"]
adversarial = st.lists(st.sampled_from([*letters, *digits, *blanks, *others]), max_size=30).map("".join)


def scan_of(data: bytes, before: bytes = b"", after: bytes = b"\0") -> list[int] | int:
    """Where the pretokens of ``data`` begin, or -1 less the place that is not UTF-8, with garbage around the text."""
    buffer = np.frombuffer(before + data + (after * 128)[:128], np.uint8).copy()
    starts = np.empty(len(data) + 64, np.int32)
    found = scan(buffer, len(before), len(before) + len(data), character_classes(), starts)
    return (starts[:found] - len(before)).tolist() if found >= 0 else found + len(before)


def expected_starts(text: str) -> list[int]:
    return list(accumulate((len(pretoken.encode()) for pretoken in pretokenize(text)), initial=0))[:-1]


def expected_scan(data: bytes) -> list[int] | int:
    """As :func:`scan_of` by Python's strict decoder and ``regex``."""
    try:
        return expected_starts(data.decode())
    except UnicodeDecodeError as error:
        return -1 - error.start


@settings(deadline=None, max_examples=1000)
@given(st.integers(0, 70), st.sampled_from("a1 '\u3000"), adversarial, st.binary(max_size=5), st.binary(min_size=1))
def test_scan_equals_the_pattern(length: int, filler: str, text: str, before: bytes, after: bytes) -> None:
    text = filler * length + text
    assert scan_of(text.encode(), before, after) == expected_starts(text)


@pytest.mark.parametrize("filler", ["x", " ", "1", "."])
def test_scan_equals_the_pattern_at_the_end_of_a_block(filler: str) -> None:
    """Any two pieces, wherever they lie across the end of a block, whatever follows."""
    pieces = [*letters, *digits, *blanks, *others]
    for (one, two), follows in product(product(pieces, pieces), ("", "s", " x")):
        size = len((one + two).encode())
        for length in range(BLOCK - size, BLOCK + 1):
            text = filler * length + one + two + follows
            assert scan_of(text.encode(), after=b"s \x80e") == expected_starts(text), text


def test_scan_knows_every_character() -> None:
    """Each of all planes: after a letter, a digit, a space and itself."""
    for plane in range(17):
        points = (point for point in range(plane << 16, (plane + 1) << 16) if not 0xD800 <= point < 0xE000)
        text = "".join(f"a{c}1{c} {c}" for c in map(chr, points))
        assert scan_of(text.encode()) == expected_starts(text), plane


@settings(deadline=None, max_examples=500)
@given(st.text(st.characters(codec="utf-8"), max_size=150), st.binary(min_size=1, max_size=9))
def test_scan_equals_the_pattern_on_any_text(text: str, after: bytes) -> None:
    assert scan_of(text.encode(), after=after) == expected_starts(text)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Text of some blocks with some bytes changed, taken out or put in."""
    data = bytearray(("x" * draw(st.integers(0, 66)) + draw(adversarial)).encode())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(data)


@settings(deadline=None, max_examples=1000)
@given(damaged() | st.binary(max_size=200), st.binary(max_size=3), st.sampled_from([b"\x80", b"\xbf", b"a", b"\xff"]))
def test_scan_refuses_what_python_refuses(data: bytes, before: bytes, after: bytes) -> None:
    assert scan_of(data, before, after) == expected_scan(data)


@pytest.mark.parametrize("length", [0, 61, 63])
def test_scan_refuses_what_python_refuses_of_all_first_two_bytes(length: int) -> None:
    for one, two, rest in product(range(0xC0, 0x100), range(256), (b"", b"\x80", b"\xbf\x80", b"\x80a")):
        data = b"x" * length + bytes([one, two]) + rest
        assert scan_of(data, after=b"\x80") == expected_scan(data), data


# walking: special tokens, blocks and windows

OVERLAPPING = [
    *["<s>", "<s>b", "xx<s>yy", "s>b<", "<", " a", "a ", "a b", "\n", "\n\n", "é", "éa", "日", "本日", "日本日本日"],
    *["'s", "ab", "aba", "1", "🙂", "🙂🙂", "<|end of text|>", END_OF_TEXT, END_OF_TEXT * 2],
]
walked = st.lists(
    st.sampled_from([*OVERLAPPING, *letters, *digits, *blanks, *others, "<|end", "<s", "xx<s>y", "日本日本", "b" * 70]),
    max_size=25,
).map("".join)


@pytest.fixture(scope="module")
def overlapping() -> Tokenizer:
    """A tokenizer whose special tokens begin, end and go on like one another."""
    return make_tokenizer(special_tokens=OVERLAPPING)


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Blocks of these sizes, inside characters too, and the rest."""
    for size in sizes:
        yield data[:size]
        data = data[size:]
    yield data


def ids_of(tokenizer: Tokenizer, blocks: Iterator[bytes], allowed: Collection[str], window: int) -> list[int]:
    return [token_id for ids in tokenizer.encode_blocks(blocks, allowed, window) for token_id in ids.tolist()]


@settings(deadline=None, max_examples=1000)
@given(walked, st.sets(st.sampled_from(OVERLAPPING)), st.lists(st.integers(0, 40), max_size=8), st.integers(1, 150))
@example("abcde<s>b", {"<s>", "<s>b"}, [], 8)  # the window ends where the shorter one does
@example("abcdexx<s>yy", {"<s>", "xx<s>yy"}, [], 10)  # and inside the one that begins earlier
def test_walking_in_windows_equals_the_reference(
    overlapping: Tokenizer, text: str, allowed: set[str], sizes: list[int], window: int
) -> None:
    expected = overlapping.encode_reference(text, [token for token in OVERLAPPING if token in allowed])
    assert overlapping.encode(text, allowed) == expected
    assert ids_of(overlapping, cut(text.encode(), sizes), allowed, window) == expected


@settings(deadline=None, max_examples=300)
@given(damaged() | st.binary(max_size=200), st.lists(st.integers(0, 40), max_size=8), st.integers(1, 150))
def test_a_text_that_is_not_utf8_is_refused_where_python_refuses_it(
    overlapping: Tokenizer, data: bytes, sizes: list[int], window: int
) -> None:
    expected = expected_scan(data)
    if not isinstance(expected, int):
        assert ids_of(overlapping, cut(data, sizes), "all", window) == overlapping.encode(data.decode())
        return
    place = -1 - expected
    with pytest.raises(UserError, match=rf"not UTF-8: byte 0x{data[place]:02x} at offset {place:,}\.") as caught:
        ids_of(overlapping, cut(data, sizes), "all", window)
    assert isinstance(caught.value, NotUtf8)
    assert (caught.value.offset, caught.value.byte) == (place, data[place])
    assert overlapping.encode("one two") == overlapping.encode_reference("one two", OVERLAPPING)  # it can go on


def test_windows_that_end_beside_a_special_token() -> None:
    """Hundreds of them, none with a pretoken that is certain at its end. In a process that can be ended."""
    code = """
from lm.counts import count_pretokens
from tests.tokenizers_made import bytes_tokenizer
tokenizer = bytes_tokenizer(["<s>"])
assert list(tokenizer.encode_iterable(["word<s>"] * 200_000)) == [*b"word", 256] * 200_000
[counts] = count_pretokens([[b"word<s>" * 3_000_000]], ["<s>"])
assert counts.to_pydict() == {"pretoken": [b"word"], "count": [3_000_000]}
"""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "XDG_CACHE_HOME": str(CACHE.parents[2])}  # where this process has compiled them
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


# ids


def random_texts(number: int) -> list[str]:
    """Texts of all planes, half of them with the characters that matter to the pattern among them."""
    source = random.Random(5)
    plain = [*letters, *digits, *blanks, *others, "the", " and", " a", "ab", "\n\n"]

    def piece(is_plain: bool) -> str:
        if is_plain and source.random() < 0.8:
            return source.choice(plain)
        point = source.randrange(0x110000)
        return chr(point if not 0xD800 <= point < 0xE000 else source.randrange(0x3000))

    return ["".join(piece(i % 2 == 0) for _ in range(source.randrange(1, 20))) for i in range(number)]


@pytest.mark.parametrize("name", ["made", "gpt2"])
def test_ids_equal_the_reference_on_100_000_texts(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer = make_tokenizer(special_tokens=[END_OF_TEXT])
    if name == "gpt2":
        folder: Path = request.getfixturevalue("shared_data")
        tokenizer = Tokenizer.from_files(folder / "gpt2_vocab.json", folder / "gpt2_merges.txt", [END_OF_TEXT])
    assert tokenizer._encoder is not None
    texts = random_texts(100_000)
    ids = tokenizer.encode("".join(text + END_OF_TEXT for text in texts))
    end = tokenizer.special_ids[END_OF_TEXT]
    at = 0
    for text in texts:
        expected = [*tokenizer.encode_reference(text, []), end]
        assert ids[at : at + len(expected)] == expected, text
        at += len(expected)
    assert at == len(ids)


def renumbered(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokenizer:
    """The same tokenizer with other ids."""
    vocab = {ids[token_id]: token for token_id, token in tokenizer.vocab.items()}
    return Tokenizer(vocab, tokenizer.merges, tokenizer.special_tokens)


@pytest.mark.parametrize("first", [0, 65_536 - 660, 65_537 - 660, 65_537, (1 << 24) - 660])
def test_ids_in_any_order_and_of_any_size(tokenizer: Tokenizer, first: int) -> None:
    """uint16 up to id 65,535, then uint32."""
    assert tokenizer.size == 660
    ids = random.Random(first).sample(range(first, first + 660), 660)
    other = renumbered(tokenizer, ids)
    assert other._encoder is not None
    [array] = other.encode_blocks([b"one"])
    assert array.dtype == (np.uint16 if first + 660 <= 1 << 16 else np.uint32)
    for text in ["".join(demo_stories(30)), "".join(random_texts(2000)), " Once" * 5, "".join(SPECIALS) * 3]:
        for _ in range(2):  # the second time out of the memory of pretokens
            found = other.encode(text)
            assert found == [ids[token_id] for token_id in tokenizer.encode(text)]
            assert found == other.encode_reference(text, SPECIALS)


@pytest.mark.parametrize(
    ("merges", "text"),
    [
        ([(b"a", b"a"), (b"aa", b"b"), (b"a", b"b"), (b"a", b"ab"), (b"aab", b"c")], "aabc"),  # aab in two ways
        ([(b"a", b"b"), (b"b", b"c"), (b"a", b"b")], "abc"),  # one merge twice
    ],
)
def test_a_token_made_by_two_merges(merges: list[tuple[bytes, bytes]], text: str) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    tokenizer = Tokenizer(dict(enumerate(dict.fromkeys(tokens))), merges)
    assert tokenizer._encoder is None
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])


@settings(deadline=None, max_examples=200)
@given(st.data(), st.text("ab", max_size=80))
def test_merges_in_any_order(data: st.DataObject, text: str) -> None:
    """Those that the kernels do not know too: a part that is made later, or never; a token made by two merges."""
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
    made = [b"a", b"b"]
    for left, right in merges:
        is_known = left in made and right in made and left + right not in made
        made.append(left + right if is_known else b"")
    assert (tokenizer._encoder is None) == (b"" in made)
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])
