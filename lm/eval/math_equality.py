"""Equality of mathematical answers, by the library math-verify (Kydlíček 2025)."""

import logging
import re
from decimal import Decimal, InvalidOperation

from lm.common.errors import UserError
from lm.eval.answers import extract_boxed

MAX_ANSWER_CHARACTERS = 1_000

_GROUPED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")


def is_math_equal(answer: str, ground_truth: str) -> bool:
    """Return whether ``answer`` equals ``ground_truth``; both are LaTeX or plain text.

    Equal texts, and plain numbers, are compared without the library. An answer of more than 1,000 characters is wrong.
    The library's time limits are off, because they work in the main thread only; run hostile answers in a
    :class:`lm.eval.reward_worker.RewardWorker`. Raises UserError if the library is needed and not installed.
    """
    answer, ground_truth = answer.strip(), ground_truth.strip()
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    if answer == ground_truth:
        return True
    numbers = [_parse_number(text) for text in (answer, ground_truth)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    try:
        from math_verify import parse, verify  # slow to import
    except ImportError:
        raise UserError("Comparing formulas needs math-verify; install textmill[math].") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call without a time limit
    expected_box, box = (f"\\boxed{{{text}}}" for text in (ground_truth, answer))
    if extract_boxed(box) != answer:  # it closes the box, and could put another answer behind it
        return False
    parsed = [parse(text, parsing_timeout=None) for text in (expected_box, box)]
    return all(parsed) and verify(*parsed, timeout_seconds=None)


def _parse_number(text: str) -> Decimal | None:
    text = text.removeprefix("$")
    if _GROUPED_THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if "_" in text:  # Decimal would skip it, but 204_5 has the base 5
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
