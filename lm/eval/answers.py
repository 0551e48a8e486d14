"""Extraction of answers from the output of a model (CS336 assignment 5)."""

import re
from collections.abc import Mapping
from typing import Any

_SIGN = r"(?:(?<![\w.)])[-\u2212](?:\\?[$€£])?)?"
_NUMBER = re.compile(_SIGN + r"(?:\d+(?:(?:\\?,|\{,\})\d{3})*(?:\.\d+)?|\.\d+)")
_AFTER_LETTER = r"(?:[.):,]|\W*$)"  # no other character: a word may follow the article A
# Within a sentence. After a colon or a line break, an A before a word may be the article.
_BEFORE_LETTER = r"(?:[^\w.!?:\n]{0,5}|[^\w.!?]{0,6}(?!A\s+(?!(?:as|because|is|since)\b)[a-z]))"
_THINK_THEN_ANSWER = re.compile(r"</think>\s*<answer>")
_BRACES = re.compile(r"\\?[{}]")


def parse_mmlu_response(example: Mapping[str, Any], output: str) -> str | None:
    r"""Return the letter of the option that ``output`` chooses, or None.

    ``example`` has the ``options`` (or ``choices``). In order: the choice of the last ``\boxed{…}``; the last letter
    after ``answer is``, ``answer:`` and the like, or else after ``option`` or ``choice``; a letter at the start; the
    text of an option alone; the only letter before a punctuation mark or the end.
    """
    boxed = extract_boxed(output)
    if boxed is not None and (letter := parse_mmlu_response(example, boxed)):
        return letter
    options = [_bare(str(option)) for option in example.get("options") or example.get("choices") or "ABCD"]
    letters = "".join(chr(ord("A") + index) for index in range(len(options)))
    for name in (r"answer(?:\s+is)?(?:\s+option|\s+choice)?", r"(?:option|choice)(?:\s+is)?"):
        if stated := re.findall(rf"(?i:{name}){_BEFORE_LETTER}([{letters}])(?![\w'])", output):
            return stated[-1]
    if leading := re.match(rf"\W{{0,5}}([{letters}]){_AFTER_LETTER}", output):
        return leading[1]
    if output.strip() and options.count(bare := _bare(output)) == 1:
        return letters[options.index(bare)]
    mentioned = set(re.findall(rf"(?<![\w'])([{letters}]){_AFTER_LETTER}", output))
    return mentioned.pop() if len(mentioned) == 1 else None


def _bare(text: str) -> str:
    return text.strip().rstrip(". \n").lower()


def parse_gsm8k_response(output: str) -> str | None:
    """Return the last number in ``output`` without its commas, such as ``-1234.5``, or None.

    Its sign may be a hyphen or U+2212, the minus sign of typesetting, before a sign of a currency. Commas may be those
    of LaTeX.
    """
    numbers: list[str] = _NUMBER.findall(output)
    return re.sub(r"[^-\d.]", "", numbers[-1].replace("\u2212", "-")) if numbers else None


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}`` with balanced braces, or None if it is not closed."""
    _, mark, rest = text.rpartition("\\boxed{")
    if not mark:
        return None
    depth = 1
    for brace in _BRACES.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} are characters
        if not depth:
            return rest[: brace.start()]
    return None


def extract_r1_zero(response: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>`` that follows a ``</think>``, or None.

    Any white space may lie between the tags. The prompt may have written ``<think>`` already.
    """
    start = None
    for match in _THINK_THEN_ANSWER.finditer(response):
        start = match.end()
    if start is None:
        return None
    answer, mark, _ = response[start:].partition("</answer>")
    return answer.strip() if mark else None
