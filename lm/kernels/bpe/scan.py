"""Choice of the scanner by the type of its rules when a kernel is compiled, so that no other one is compiled."""

from typing import Any

from numba.extending import overload

from lm.kernels.bpe.cl100k_starts import Cl100kRules, find_cl100k_starts
from lm.kernels.bpe.classes import UPPER, WHITESPACE
from lm.kernels.bpe.deepseek_starts import DeepseekRules, find_deepseek_starts
from lm.kernels.bpe.o200k_starts import O200kRules, find_o200k_starts
from lm.kernels.bpe.pretoken_starts import class_at, class_before, find_pretoken_starts
from lm.kernels.jit import HELPER_OPTIONS, Bytes, Int, Int32s, inlined

Rules = Cl100kRules | O200kRules | DeepseekRules | None  # None: GPT-2's pattern


@inlined
def is_inner_whitespace(buffer: Bytes, begin: int, position: int, end: int, classes: Bytes) -> bool:
    """Return whether whitespace is at ``position`` after whitespace. A line break after it would join them."""
    is_whitespace = class_at(buffer, position, end, classes) == WHITESPACE
    return is_whitespace and class_before(buffer, begin, position, classes) == WHITESPACE


@inlined
def is_capital_after_uncased(buffer: Bytes, begin: int, position: int, end: int, classes: Bytes) -> bool:
    """Return whether a capital is at ``position`` after a letter without case or a mark. A small letter after the
    capitals would join them."""
    is_capital = class_at(buffer, position, end, classes) == UPPER
    return is_capital and class_before(buffer, begin, position, classes) > UPPER


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
    scanner = getattr(rules, "instance_class", None)
    if scanner is O200kRules:
        return lambda buffer, begin, end, classes, rules, starts: find_o200k_starts(
            buffer, begin, end, classes, rules, starts
        )
    if scanner is DeepseekRules:
        return lambda buffer, begin, end, classes, rules, starts: find_deepseek_starts(
            buffer, begin, end, classes, rules, starts
        )
    if scanner is Cl100kRules:
        return lambda buffer, begin, end, classes, rules, starts: find_cl100k_starts(
            buffer, begin, end, classes, rules, starts
        )
    return lambda buffer, begin, end, classes, rules, starts: find_pretoken_starts(buffer, begin, end, classes, starts)


@overload(may_join, jit_options=HELPER_OPTIONS, strict=False)
def _choose_join(buffer: Any, begin: Any, position: Any, end: Any, classes: Any, rules: Any) -> Any:
    scanner = getattr(rules, "instance_class", None)
    if scanner is O200kRules:
        return lambda buffer, begin, position, end, classes, rules: (
            is_inner_whitespace(buffer, begin, position, end, classes)
            or is_capital_after_uncased(buffer, begin, position, end, classes)
        )
    if scanner is Cl100kRules or scanner is DeepseekRules:
        return lambda buffer, begin, position, end, classes, rules: is_inner_whitespace(
            buffer, begin, position, end, classes
        )
    return lambda buffer, begin, position, end, classes, rules: False
