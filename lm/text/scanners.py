"""Which pretoken patterns the kernels can find, and how."""

from lm.kernels.bpe.cl100k_starts import Cl100kRules
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import Pattern

_RULES: dict[Pattern, Cl100kRules | None] = {
    PATTERNS["gpt2"]: None,
    PATTERNS["cl100k"]: Cl100kRules(max_digits=3, joins_last_whitespace=True),
    PATTERNS["llama3"]: Cl100kRules(max_digits=3, joins_last_whitespace=False),
    PATTERNS["qwen2"]: Cl100kRules(max_digits=1, joins_last_whitespace=False),
}


def has_compiled_scanner(pattern: Pattern) -> bool:
    """Return whether the kernels find the pretokens of a pattern."""
    return pattern in _RULES


def scanner_rules(pattern: Pattern) -> Cl100kRules | None:
    """Return how the kernels find the pretokens of a pattern that has a compiled scanner; None: by GPT-2's scanner."""
    return _RULES[pattern]
