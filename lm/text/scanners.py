"""Which pretoken patterns the kernels can find, and how."""

import logging
from functools import cache, lru_cache

import numpy as np

from lm.kernels.bpe import classes as known
from lm.kernels.bpe.cl100k_starts import Cl100kRules
from lm.kernels.bpe.deepseek_starts import DeepseekRules
from lm.kernels.bpe.o200k_starts import O200kRules
from lm.kernels.bpe.scan import Rules
from lm.kernels.jit import Bytes
from lm.text.character_tables import installed_tables, unpack_tables
from lm.text.patterns import CJK, PATTERNS, has_compiled_scanner
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


def scanner_classes(rules: Rules, tables: str | None = None) -> Bytes:
    """Return the class of each code point, uint8 (0x110000,), for the scanner of ``rules``.

    ``tables`` are by default those of the installed ``regex``; see :mod:`lm.text.character_tables`.
    """
    is_cased, is_cjk = isinstance(rules, O200kRules), isinstance(rules, DeepseekRules)
    return _scanner_classes(is_cased, is_cjk, tables or installed_tables())


@lru_cache(maxsize=8)
def _scanner_classes(is_cased: bool, is_cjk: bool, tables: str) -> Bytes:
    scanned = np.arange(8, dtype=np.uint8)  # by class in the tables
    if not is_cased:
        scanned[[known.UPPER, known.UNCASED, known.MARK]] = known.LETTER, known.LETTER, known.OTHER
    if is_cjk:
        scanned[known.MARK] = known.LETTER
    else:
        scanned[known.CONTROL] = known.OTHER
    classes: Bytes = scanned[unpack_tables(tables)]
    for first, last in zip(CJK[::3], CJK[2::3], strict=True) if is_cjk else ():
        classes[ord(first) : ord(last) + 1] |= known.CJK
    return classes


def scanner_subject(rules: Rules) -> str:
    """Return what to add to the name of the kernels that are compiled for ``rules``."""
    names = {O200kRules: " by o200k", DeepseekRules: " by deepseek", Cl100kRules: " by other patterns"}
    return "" if rules is None else names[type(rules)]
