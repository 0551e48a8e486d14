"""The pretoken patterns of well-known tokenizers, by name."""

import logging
import re
from collections.abc import Sequence
from functools import cache

from lm.common.errors import UserError, did_you_mean
from lm.text.pretokenize import GPT2_PATTERN, JIEBA, Pattern

log = logging.getLogger(__name__)

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BEFORE_WORD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# DeepSeek V3 splits a text by three patterns in turn: each splits the pieces of the one before, matched or not.
CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK_WORDS = (r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+").replace(
    r"\r\n", "\r\n"
)  # the file has the characters
DEEPSEEK_SPLITS = r"\p{N}{1,3}", f"[{CJK}]+", _ASCII_WORD + _DEEPSEEK_WORDS
# The same as one pattern: matches end where a piece ends, and the last line matches what the third pattern leaves.
_IS_CJK, _IS_OTHER, _LETTER, _SYMBOL = f"(?=[{CJK}])", f"(?![{CJK}])", r"[\p{L}\p{M}]", r"[\p{P}\p{S}]"
_DEEPSEEK_PATTERN = (
    rf"\p{{N}}{{1,3}}|{_ASCII_WORD}"
    rf"|(?:{_IS_CJK}[^\p{{L}}\p{{P}}\p{{S}}])?(?:{_IS_CJK}{_LETTER})+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{CJK}]?(?:{_IS_OTHER}{_LETTER})+"
    rf"|(?:{_IS_CJK}{_SYMBOL})+| ?(?:{_IS_OTHER}{_SYMBOL})+[\r\n]*"
    rf"|\s*[\r\n]+|\s+(?![^\s\p{{N}}{CJK}])|\s+"
    rf"|(?:{_IS_CJK}\p{{C}}(?!{_IS_CJK}{_LETTER}))+|(?:(?![\s{CJK}])\p{{C}}(?!{_IS_OTHER}{_LETTER}))+"
)

# With compiled scanners; see :mod:`lm.kernels.bpe.scanners.registry`.
PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": _LLAMA3_PATTERN,
    "qwen2": _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
    # Also that of gpt-oss.
    "o200k": rf"{_BEFORE_WORD}{_CAPITALS}*{_SMALL}+{_CONTRACTION}|{_BEFORE_WORD}{_CAPITALS}+{_SMALL}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek": _DEEPSEEK_PATTERN,
}
PATTERN_NAMES: dict[Pattern, str] = {pattern: name for name, pattern in PATTERNS.items()}

MAX_SEGMENT_WORDS = 16


def _join_words(pattern: str, first: str, following: str) -> str:
    """Return ``pattern`` with ``following`` words after its alternatives ``first``, with which it must begin."""
    rest = pattern.removeprefix(first)
    return f"(?:{first})(?:{following}){{0,{MAX_SEGMENT_WORDS - 1}}}{rest}"


_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)", r"'(?i:[sdmt]|ll|ve|re)", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORD, _CL100K_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+", r"|[^\r\n\p{L}\p{N}]?+\p{L}++"
_WORDS = {
    "gpt2": (rf"{_CONTRACTIONS[0]}| ?\p{{L}}+", rf"{_CONTRACTIONS[0]}| \p{{L}}+"),
    "cl100k": (_CONTRACTIONS[1] + _CL100K_WORD, rf"{_CONTRACTIONS[1]}|[ ']\p{{L}}++"),
    "llama3": (_CONTRACTIONS[2] + _LLAMA3_WORD, rf"{_CONTRACTIONS[2]}|[ ']\p{{L}}+"),
    "qwen2": (_CONTRACTIONS[2] + _LLAMA3_WORD, rf"{_CONTRACTIONS[2]}|[ ']\p{{L}}+"),
}
SEGMENT_PATTERNS = {name: _join_words(PATTERNS[name], *words) for name, words in _WORDS.items()}
"""By the name of a pattern: the pattern of its segments, which superwords may not leave. A segment is a pretoken of the
pattern, or up to 16 words in a row: each but the first begins with one space, or with the apostrophe of a contraction,
and follows a letter."""
SEGMENT_PATTERN_NAMES: dict[Pattern, str] = {pattern: name for name, pattern in SEGMENT_PATTERNS.items()}


def segment_pattern(pattern: Pattern) -> str:
    """Return the pattern of the segments of a resolved pattern. Raises UserError if it has none."""
    name = PATTERN_NAMES.get(pattern)
    if name not in SEGMENT_PATTERNS:
        raise UserError(
            f"tokenizer.superwords does not work with the pattern {name or pattern}. Use one of "
            f"{', '.join(SEGMENT_PATTERNS)}, or set tokenizer.superwords to 0."
        )
    return SEGMENT_PATTERNS[name]


def has_compiled_scanner(pattern: Pattern) -> bool:
    """Return whether the kernels find the pretokens of a resolved pattern."""
    return pattern in PATTERN_NAMES or pattern in SEGMENT_PATTERN_NAMES


@cache
def warn_of_slow_pattern(pattern: Pattern) -> None:
    """Log, once in a process, that a pattern has no compiled scanner, if it has none."""
    if not has_compiled_scanner(pattern):
        log.warning(
            "The pretoken pattern %r has no compiled scanner; the regex module finds the pretokens, fifty times "
            "slower, in a process for each thread. Patterns with a compiled scanner: %s.",
            pattern,
            ", ".join(PATTERNS),
        )


def resolve_pattern(pattern: str) -> str:
    """Return the regular expression of a pattern that is given by name or as a regular expression.

    Letters, digits, dashes and underscores alone are taken for a misspelt name, and raise UserError.
    """
    names = [*PATTERNS, JIEBA]
    if pattern not in names and re.fullmatch(r"[\w-]+", pattern):
        raise UserError(
            f"There is no pattern {pattern!r}{did_you_mean(pattern, names)}. Patterns: {', '.join(names)}, or a "
            "regular expression."
        )
    return PATTERNS.get(pattern, pattern)


def resolve_patterns(patterns: str | Sequence[str]) -> Pattern:
    """Return the pattern of a name or regular expression, or of several of them; see :data:`Pattern`.

    DeepSeek's three are the one pattern that has a compiled scanner.
    """
    if isinstance(patterns, str):
        return resolve_pattern(patterns)
    resolved = tuple(map(resolve_pattern, patterns))
    if resolved == DEEPSEEK_SPLITS:
        return PATTERNS["deepseek"]
    return resolved if len(resolved) != 1 else resolved[0]
