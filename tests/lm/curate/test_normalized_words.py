import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.curate import pack_documents, pack_utf8
from lm.curate.minhash import hash_ngrams
from lm.curate.normalized_words import normalize_words, words_identity
from lm.kernels.curation.word_hashes import BLOCK_WORDS
from tests.helpers.kernels import PIECES
from tests.helpers.shingles import hash_word

HARD = [
    "don't",
    "well—known",
    "ΟΔΟΣ",
    "İx",
    "Ǆ",
    "ﬁ",
    "한국어",
    "か\u3099",
    "豈",
    "\u0344",
    "a\u0327\u0301",
    "K",
    "Å",
    "١٢",
]
WORDS = ["Word", "two,", "(x)", "a" * 7, "B" * 8, "c" * 9, "d" * 63, "e" * 64, "f" * 65, "-", "--", "x-y", "9" * 17]
texts = st.lists(st.sampled_from([*PIECES, *HARD, *WORDS, " ", "\n"]) | st.text(max_size=3), max_size=40).map("".join)


def word_hashes(texts: list[str]) -> list[list[int]]:
    """Return the hashes of the words of each text, by the kernel: runs of one word."""
    hashes, ends = hash_ngrams(pack_documents(texts), 1, has_short=True)
    return [hashes[begin:end].tolist() for begin, end in zip(ends, ends[1:], strict=False)]


def expected_hashes(texts: list[str]) -> list[list[int]]:
    return [[hash_word(word) for word in normalize_words(text).split()] for text in texts]


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("  The quick\n\tBROWN fox. ", "the quick brown fox"),
        ("Don't re-enter: naïve café!", "dont reenter naive cafe"),
        ("a - b", "a b"),
        ("ΟΔΟΣ οδός", "οδοσ οδοσ"),
        ("日本語 text、カタカナ", "日 本 語 text カ タ カ ナ"),
        ("5$ + 3^2", "5 32"),
        ("...", ""),
    ],
)
def test_text_is_normalized_as_the_course_says(text: str, normalized: str) -> None:
    assert normalize_words(text) == normalized


def test_normalization_equals_that_of_the_course_without_chinese_and_japanese() -> None:
    """The steps as the assignment lists them, on every character of the alphabets."""
    text = "".join(f"{chr(point)}x " for point in range(0x2E80) if chr(point) not in "ς\x00")
    steps = unicodedata.normalize("NFD", text.lower())
    steps = "".join(c for c in steps if not unicodedata.combining(c))
    steps = "".join(c for c in steps if unicodedata.category(c)[0] != "P" and c not in "$+<=>^`|~")
    assert normalize_words(text) == " ".join(steps.split())


def test_the_kernel_normalizes_every_character_that_changes() -> None:
    """And every 40th of the others."""
    points = [point for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    characters = [chr(point) for point in points if point % 40 == 0 or normalize_words(chr(point)) != chr(point)]
    assert len(characters) > 40_000
    blocks = ["".join(f"a{c}b {c}{c} " for c in characters[i : i + 4096]) for i in range(0, len(characters), 4096)]
    assert word_hashes(blocks) == expected_hashes(blocks)


@given(st.lists(texts | st.text(), max_size=4))
def test_the_kernel_finds_the_normalized_words(texts: list[str]) -> None:
    assert word_hashes(texts) == expected_hashes(texts)


def test_long_words_and_documents_of_many_blocks() -> None:
    texts = [
        "x" * 300_000,
        "É" * 100_001,
        "ab, " * (3 * BLOCK_WORDS),
        "日" * (2 * BLOCK_WORDS + 1),
        "-" * 5_000,
        " " * 5_000,
    ]
    assert word_hashes(texts) == expected_hashes(texts)


def test_bytes_that_are_not_utf8_do_not_stop_the_kernel() -> None:
    hashes, ends = hash_ngrams(pack_utf8([b"ab \xff\xc3 \xe2\x82"]), 1, has_short=True)
    assert ends.tolist() == [0, 3] and hashes[0] == hash_word("ab")
    dense = "ёж ".encode() * 20
    hashes, ends = hash_ngrams(pack_utf8([dense + b"\xc3 \xe2\x82 \xd1( " + dense + b"\xd1"]), 1, has_short=True)
    damaged = ["\N{REPLACEMENT CHARACTER}" * count for count in (1, 2, 1)]
    words = ["еж"] * 20 + damaged + ["еж"] * 20 + ["\N{REPLACEMENT CHARACTER}"]
    assert hashes.tolist() == [hash_word(word) for word in words]


def test_the_identity_is_a_digest() -> None:
    assert len(words_identity()) == 64
