"""The pretoken patterns of well-known tokenizers, by name."""

from lm.text.pretokenize import GPT2_PATTERN

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "cl100k": _CL100K_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "qwen2": _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}


def resolve_pattern(pattern: str) -> str:
    """Return the regular expression of a pattern that is given by name or as a regular expression."""
    return PATTERNS.get(pattern, pattern)
