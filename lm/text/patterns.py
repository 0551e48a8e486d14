"""The pretoken patterns of well-known tokenizers, by name."""

from collections.abc import Sequence

from lm.text.pretokenize import GPT2_PATTERN, Pattern

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_BEFORE_WORD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_PATTERN = (
    rf"{_BEFORE_WORD}{_CAPITALS}*{_SMALL}+{_CONTRACTION}|{_BEFORE_WORD}{_CAPITALS}+{_SMALL}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "cl100k": _CL100K_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "qwen2": _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
    "o200k": _O200K_PATTERN,
}


def resolve_pattern(pattern: str) -> str:
    """Return the regular expression of a pattern that is given by name or as a regular expression."""
    return PATTERNS.get(pattern, pattern)


def resolve_patterns(patterns: str | Sequence[str]) -> Pattern:
    """Return the pattern of a name or regular expression, or of several of them; see :data:`Pattern`."""
    if isinstance(patterns, str):
        return resolve_pattern(patterns)
    resolved = tuple(map(resolve_pattern, patterns))
    return resolved if len(resolved) != 1 else resolved[0]
