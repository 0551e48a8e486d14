"""Pretoken starts by the kernels and by ``regex``, and pieces of text that are hard for both."""

from itertools import accumulate

import numpy as np
from hypothesis import strategies as st

from lm.kernels.bpe.scanners import registry
from lm.kernels.bpe.scanners.registry import SCANNERS, Rules
from lm.kernels.jit import INVALID_UTF8, Bytes, Int32s, kernel
from lm.text.character_tables import installed_tables, scanner_classes
from lm.text.patterns import PATTERN_NAMES, PATTERNS
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN, pretokenize

patterns = st.sampled_from(list(PATTERNS.values()))
LETTERS = ["a", "s", "ll", "é", "日", "𝒳", "ª", "ſ", "A", "É", "ǅ"]
DIGITS = ["1", "٣", "Ⅷ", "𝟗", "½"]
WHITESPACE = [" ", "  ", "\n", "\t ", "\r\n", "\n\n", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u3000", " \u3000"]
OTHERS = [
    "'",
    "'s",
    "'ll",
    "'ve",
    "'re",
    "'d",
    "'l",
    "'S",
    "'LL",
    "'ſ",
    "''",
    "“",
    "!",
    "/",
    "!\n/",
    "!!\u0301",
    "❤\ufe0f",
    "\x1c",
    "\x1f",
    "\u0301",
    "🙂",
    "\u200b",
    "\x00",
    "・",
    "\u3040",
    "(a",
]
PIECES = [*LETTERS, *DIGITS, *WHITESPACE, *OTHERS]
OVERLAPPING_SPECIALS = [
    *["<s>", "<s>b", "xx<s>yy", "s>b<", "<", " a", "a ", "a b", "\n", "\n\n", "é", "éa", "日", "本日", "日本日本日"],
    *["'s", "ab", "aba", "1", "🙂", "🙂🙂", "<|end of text|>", END_OF_TEXT, END_OF_TEXT * 2],
]
hard_texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@st.composite
def _damage(draw: st.DrawFn) -> bytes:
    data = bytearray(("x" * draw(st.integers(0, 66)) + draw(hard_texts)).encode())
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(data)))
        data[i : i + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(data)


damaged_texts = _damage() | st.binary(max_size=200)  # UTF-8 with bytes changed, removed or inserted; random bytes


@kernel
def _find_starts(buffer: Bytes, begin: int, end: int, classes: Bytes, rules: Rules, starts: Int32s) -> int:
    return registry.find_starts(buffer, begin, end, classes, rules, starts)


def find_starts(data: bytes, before: bytes = b"", after: bytes = b"\0", pattern: str = GPT2_PATTERN) -> list[int] | int:
    """Return the starts of the pretokens of ``data``, or the offset of its first invalid byte.

    ``before`` and ``after``, repeated, are around it in the buffer.
    """
    buffer = np.frombuffer(before + data + (after * 128)[:128], np.uint8).copy()
    starts = np.empty(len(data) + 64, np.int32)
    scanner = SCANNERS[PATTERN_NAMES[pattern]]
    classes = scanner_classes(scanner, installed_tables())
    n = int(_find_starts(buffer, len(before), len(before) + len(data), classes, scanner.rules, starts))
    return (starts[:n] - len(before)).tolist() if n >= 0 else INVALID_UTF8 - n - len(before)


def expected_starts(data: bytes, pattern: str = GPT2_PATTERN) -> list[int] | int:
    """Return the same as :func:`find_starts`, by Python's UTF-8 decoder and ``regex``."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return list(accumulate((len(pretoken.encode()) for pretoken in pretokenize(text, pattern)), initial=0))[:-1]
