"""Which pretoken patterns the kernels can find, and how."""

import logging
from functools import cache

from lm.kernels.bpe.cl100k_starts import Cl100kRules
from lm.kernels.bpe.classes import cased_character_classes, character_classes, cjk_character_classes
from lm.kernels.bpe.deepseek_starts import DeepseekRules
from lm.kernels.bpe.o200k_starts import O200kRules
from lm.kernels.bpe.scan import Rules
from lm.kernels.jit import Bytes
from lm.text.patterns import CJK, PATTERNS
from lm.text.pretokenize import Pattern

log = logging.getLogger(__name__)

_RULES: dict[Pattern, Rules] = {
    PATTERNS["gpt2"]: None,
    PATTERNS["cl100k"]: Cl100kRules(max_digits=3, joins_last_whitespace=True),
    PATTERNS["llama3"]: Cl100kRules(max_digits=3, joins_last_whitespace=False),
    PATTERNS["qwen2"]: Cl100kRules(max_digits=1, joins_last_whitespace=False),
    PATTERNS["o200k"]: O200kRules(max_digits=3),
    PATTERNS["deepseek"]: DeepseekRules(max_digits=3),
}


def has_compiled_scanner(pattern: Pattern) -> bool:
    """Return whether the kernels find the pretokens of a pattern."""
    return pattern in _RULES


@cache
def warn_of_slow_pattern(pattern: Pattern) -> None:
    """Log, once in a process, that a pattern has no compiled scanner, if it has none."""
    if has_compiled_scanner(pattern):
        return
    log.warning(
        "The pretoken pattern %r has no compiled scanner; the regex module finds the pretokens, fifty times slower, in "
        "a process for each thread. Patterns with a compiled scanner: %s.",
        pattern,
        ", ".join(PATTERNS),
    )


def scanner_rules(pattern: Pattern) -> Rules:
    """Return how the kernels find the pretokens of a pattern that has a compiled scanner; None: by GPT-2's scanner."""
    return _RULES[pattern]


def scanner_classes(rules: Rules) -> Bytes:
    """Return the class of each code point, uint8 (0x110000,), for the scanner of ``rules``."""
    if isinstance(rules, O200kRules):
        return cased_character_classes()
    return cjk_character_classes(CJK) if isinstance(rules, DeepseekRules) else character_classes()


def scanner_subject(rules: Rules) -> str:
    """Return what to add to the name of the kernels that are compiled for ``rules``."""
    names = {O200kRules: " by o200k", DeepseekRules: " by deepseek", Cl100kRules: " by other patterns"}
    return "" if rules is None else names[type(rules)]
