"""Registry of the patterns that have a scanner: how kernels find their pretokens.

A kernel chooses the scanner by the type of its rules when it is compiled, so that no other one is compiled.
"""

from typing import Any, NamedTuple

from numba.extending import overload

from lm.kernels.bpe.scanners.bit_masks import is_inner_whitespace
from lm.kernels.bpe.scanners.character_classes import (
    CONTROL,
    DIGIT,
    LETTER,
    LOWER,
    MARK,
    OTHER,
    UNCASED,
    UPPER,
    WHITESPACE,
)
from lm.kernels.bpe.scanners.cl100k import Cl100kRules, find_cl100k_starts
from lm.kernels.bpe.scanners.deepseek import DeepseekRules, find_deepseek_starts
from lm.kernels.bpe.scanners.gpt2 import find_gpt2_starts, never_joins
from lm.kernels.bpe.scanners.o200k import O200kRules, find_o200k_starts, may_join_o200k
from lm.kernels.jit import HELPER_OPTIONS, Bytes, Int, Int32s

Rules = Cl100kRules | O200kRules | DeepseekRules | None  # None: GPT-2's pattern


class Scanner(NamedTuple):
    """How the kernels find the pretokens of a pattern."""

    rules: Rules
    """Parameters of the pattern, passed to kernels."""
    find_starts: Any
    may_join: Any
    classes: tuple[int, ...]
    """The classes that the scanner distinguishes, by class in the tables of :mod:`lm.text.character_tables`: LOWER,
    DIGIT, WHITESPACE, OTHER, UPPER, UNCASED, MARK, CONTROL."""
    kernel_suffix: str
    """What to add to the name of the kernels that are compiled for ``rules``."""
    has_cjk: bool = False
    """Whether CJK is added to the class of Chinese and Japanese characters."""


_LETTERS = (LETTER, DIGIT, WHITESPACE, OTHER, LETTER, LETTER, OTHER, OTHER)
_CASED = (LOWER, DIGIT, WHITESPACE, OTHER, UPPER, UNCASED, MARK, OTHER)
_CONTROLS = (LETTER, DIGIT, WHITESPACE, OTHER, LETTER, LETTER, LETTER, CONTROL)
_CL100K = Scanner(Cl100kRules(3, True), find_cl100k_starts, is_inner_whitespace, _LETTERS, " by other patterns")

SCANNERS = {
    "gpt2": Scanner(None, find_gpt2_starts, never_joins, _LETTERS, ""),
    "cl100k": _CL100K,
    "llama3": _CL100K._replace(rules=Cl100kRules(max_digits=3, joins_last_whitespace=False)),
    "qwen2": _CL100K._replace(rules=Cl100kRules(max_digits=1, joins_last_whitespace=False)),
    "o200k": Scanner(O200kRules(max_digits=3), find_o200k_starts, may_join_o200k, _CASED, " by o200k"),
    "deepseek": Scanner(
        DeepseekRules(max_digits=3), find_deepseek_starts, is_inner_whitespace, _CONTROLS, " by deepseek", has_cjk=True
    ),
}
"""By the name of the pattern in :data:`lm.text.patterns.PATTERNS`."""
_BY_RULES = {type(scanner.rules): scanner for scanner in SCANNERS.values()}


def find_starts(buffer: Bytes, begin: Int, end: Int, classes: Bytes, rules: Rules, starts: Int32s) -> int:
    """Write the start of each pretoken of ``buffer[begin:end]`` to ``starts``, by the scanner of ``rules``.

    Only kernels can call it. Returns the number of pretokens, or a status below 0.
    """
    raise NotImplementedError


def may_join(buffer: Bytes, begin: Int, position: Int, end: Int, classes: Bytes, rules: Rules) -> bool:
    """Return whether text after ``end`` can join the pretokens before and after ``position``, however far it is.

    Only kernels can call it.
    """
    raise NotImplementedError


@overload(find_starts, jit_options=HELPER_OPTIONS, strict=False)
def _choose_scanner(buffer: Any, begin: Any, end: Any, classes: Any, rules: Any, starts: Any) -> Any:
    scan = _BY_RULES[getattr(rules, "instance_class", type(None))].find_starts
    return lambda buffer, begin, end, classes, rules, starts: scan(buffer, begin, end, classes, rules, starts)


@overload(may_join, jit_options=HELPER_OPTIONS, strict=False)
def _choose_join(buffer: Any, begin: Any, position: Any, end: Any, classes: Any, rules: Any) -> Any:
    join = _BY_RULES[getattr(rules, "instance_class", type(None))].may_join
    return lambda buffer, begin, position, end, classes, rules: join(buffer, begin, position, end, classes)
