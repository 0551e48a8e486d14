"""The pre_tokenizer of a tokenizer.json: from and to a pretoken pattern."""

from collections.abc import Iterable
from typing import Any

import regex

from lm.common.errors import UserError
from lm.text.patterns import DEEPSEEK_SPLITS, PATTERNS
from lm.text.pretokenize import GPT2_PATTERN, JIEBA, Pattern, compile_pattern
from lm.tokenizer.formats.oniguruma import from_oniguruma, to_oniguruma

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_PUNCTUATION = r"[\p{P}$+<=>^`|~]"  # of Unicode and of ASCII
# A pattern that is several in Hugging Face's library. The tokenizer makes one pattern of them again.
_SPLITS: dict[Pattern, tuple[str, ...]] = {PATTERNS["deepseek"]: DEEPSEEK_SPLITS}
_KNOWN = {to_oniguruma(pattern): pattern for pattern in PATTERNS.values()}


def format_pre_tokenizer(pattern: Pattern) -> dict[str, Any]:
    """Return the pre_tokenizer that splits like ``pattern``. Raises UserError if it is jieba."""
    texts = _SPLITS.get(pattern) or ((pattern,) if isinstance(pattern, str) else pattern)
    if JIEBA in texts:
        raise UserError("tokenizer.pattern jieba cannot be exported: Hugging Face's tokenizer.json cannot express it.")
    if pattern == GPT2_PATTERN:
        return {**BYTE_LEVEL, "use_regex": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": to_oniguruma(text)}, "behavior": "Isolated", "invert": False}
        for text in texts
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**BYTE_LEVEL, "use_regex": False}]}


def parse_pre_tokenizer(steps: Iterable[dict[str, Any]]) -> Pattern:
    """Return the pattern that splits like the ``steps`` of a pre_tokenizer.

    Raises UserError, by name, for a step that is not supported, and if the last is not ByteLevel.
    """
    patterns: list[str] = []
    is_byte_level = False
    for step in steps:
        if is_byte_level:
            raise _not_supported(f"the pre_tokenizer {step['type']!r} after ByteLevel")
        if step.get("add_prefix_space"):
            raise _not_supported("add_prefix_space in the pre_tokenizer")
        is_byte_level = step["type"] == "ByteLevel"
        patterns += _find_patterns(step)
    if not is_byte_level:
        raise _not_supported("a pre_tokenizer without ByteLevel")
    for pattern in patterns:
        compile_pattern(pattern)
    return tuple(patterns) if len(patterns) != 1 else patterns[0]


def _find_patterns(step: dict[str, Any]) -> list[str]:
    """Return the pattern of a step, or no pattern if it does not split."""
    match step:
        case {"type": "ByteLevel"}:
            return [GPT2_PATTERN] if step.get("use_regex", True) else []
        case {"type": "Digits"}:
            return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
        case {"type": "Punctuation"} if (behavior := step.get("behavior", "Isolated")) in ("Isolated", "Contiguous"):
            return [_PUNCTUATION if behavior == "Isolated" else f"{_PUNCTUATION}+"]
        case {"type": "Split", "pattern": {"String": str(text)}, "behavior": "Isolated"}:
            return [_group_word(regex.escape(text))]
        case {"type": "Split", "pattern": {"Regex": str(text)}, "behavior": "Isolated"}:
            return [_KNOWN[text] if text in _KNOWN else _group_word(from_oniguruma(text))]
        # All that does not match is removed. The known patterns match any text, so that nothing is.
        case {"type": "Split", "pattern": {"Regex": str(text)}, "behavior": "Removed", "invert": True}:
            if text in _KNOWN:
                return [_KNOWN[text]]
    raise _not_supported(f"the pre_tokenizer {step}")


def _group_word(pattern: str) -> str:
    """Return a pattern that is not taken for the name of a pattern."""
    return f"(?:{pattern})" if regex.fullmatch(r"[\w-]+", pattern) else pattern


def _not_supported(feature: str) -> UserError:
    return UserError(f"{feature} is not supported; use a tokenizer of byte-level BPE without it.")
