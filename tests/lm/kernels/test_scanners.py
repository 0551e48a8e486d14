"""Pretoken starts by the kernel equal those by ``regex``; invalid UTF-8 is found where Python finds it."""

import random
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.kernels.bpe.scanners.bit_masks import low_bits
from lm.text.patterns import PATTERNS
from tests.helpers.examples import examples
from tests.helpers.kernels import PIECES, damaged_texts, expected_starts, find_starts, hard_texts, patterns

_BLOCK_BYTES = 64
_FILLERS = ["x", " ", "1", "."]
OTHER_PATTERNS = [name for name in PATTERNS if name != "gpt2"]


@examples(2000)
@given(
    patterns,
    st.integers(0, 200),
    st.sampled_from("a1 '\n\u3000"),
    hard_texts,
    st.binary(max_size=5),
    st.binary(min_size=1),
)
def test_starts_equal_the_pattern(
    pattern: str, length: int, filler: str, text: str, before: bytes, after: bytes
) -> None:
    data = (filler * length + text).encode()
    assert find_starts(data, before, after, pattern) == expected_starts(data, pattern)


@pytest.mark.parametrize("filler", _FILLERS)
@pytest.mark.parametrize(
    "pattern", [PATTERNS["gpt2"], *(pytest.param(PATTERNS[name], marks=pytest.mark.slow) for name in OTHER_PATTERNS)]
)
def test_starts_equal_the_pattern_at_the_end_of_a_block(filler: str, pattern: str) -> None:
    """Any two pieces, at each place across the end of a block; with GPT-2's pattern after each filler."""
    cases = [*product(product(PIECES, PIECES), ("", "s", " x"))]
    for (first, second), following in cases if pattern == PATTERNS["gpt2"] else cases[_FILLERS.index(filler) :: 4]:
        size = len((first + second).encode())
        for length in range(_BLOCK_BYTES - size, _BLOCK_BYTES + 1):
            data = (filler * length + first + second + following).encode()
            assert find_starts(data, after=b"s \x80e", pattern=pattern) == expected_starts(data, pattern), data


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_starts_equal_the_pattern_for_every_character(pattern: str) -> None:
    """All characters of all planes, each after a letter, a digit, a space and itself."""
    for plane in range(17):
        points = (point for point in range(plane << 16, (plane + 1) << 16) if not 0xD800 <= point < 0xE000)
        data = "".join(f"a{c}1{c} {c}'{c}" for c in map(chr, points)).encode()
        assert find_starts(data, pattern=pattern) == expected_starts(data, pattern), plane


@examples(1000)
@given(patterns, st.text(st.characters(codec="utf-8"), max_size=150), st.binary(min_size=1, max_size=9))
def test_starts_equal_the_pattern_for_any_text(pattern: str, text: str, after: bytes) -> None:
    assert find_starts(text.encode(), after=after, pattern=pattern) == expected_starts(text.encode(), pattern)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "1",
        " ",
        "\n",
        "!",
        "'s",
        " \n",
        "\r\n ",
        "a ",
        "a!",
        "\u3000",
        "é",
        "日 ",
        "“a",
        "A",
        "日A",
        "\u0301A",
        "/\n",
    ],
)
def test_starts_equal_the_pattern_for_long_repetitions(pattern: str, piece: str) -> None:
    for end in ("", "a", " a", "\n", "\n ", "1", "!"):
        data = (piece * 5000 + end).encode()
        assert find_starts(data, pattern=pattern) == expected_starts(data, pattern), end


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_starts_equal_the_pattern_for_ten_million_texts(pattern: str) -> None:
    """A third of the texts have characters of all of Unicode, and a third begin before the end of a block."""
    rng = random.Random(0)
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for _ in range(10_000_000):
        pieces = rng.choices(PIECES, k=rng.randrange(1, 10))
        if rng.random() < 1 / 3:
            pieces[rng.randrange(len(pieces))] = "".join(rng.choices(characters, k=rng.randrange(1, 4)))
        if rng.random() < 1 / 3:
            pieces.insert(0, rng.choice("xX 1.\n") * rng.randrange(_BLOCK_BYTES))
        data = "".join(pieces).encode()
        assert find_starts(data, pattern=pattern) == expected_starts(data, pattern), data


@examples(1000)
@given(patterns, damaged_texts, st.binary(max_size=3), st.sampled_from([b"\x80", b"\xbf", b"a", b"\xff"]))
def test_invalid_utf8_is_found(pattern: str, data: bytes, before: bytes, after: bytes) -> None:
    assert find_starts(data, before, after, pattern) == expected_starts(data, pattern)


@pytest.mark.parametrize("length", [0, 61, 63])
def test_invalid_utf8_is_found_for_all_pairs_of_bytes(length: int) -> None:
    for first, second, rest in product(range(0xC0, 0x100), range(256), (b"", b"\x80", b"\xbf\x80", b"\x80a")):
        data = b"x" * length + bytes([first, second]) + rest
        assert find_starts(data, after=b"\x80") == expected_starts(data), data


def test_helpers_of_kernels_cannot_be_called_from_python() -> None:
    with pytest.raises(ValueError):
        low_bits(3)
