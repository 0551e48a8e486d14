"""Extraction of answers from the output of a model (CS336 assignment 5)."""

import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"(?:(?<![\w.)])[-\u2212](?:\\?[$€£])?)?(?:\d+(?:(?:\\?,|\{,\})\d{3})*(?:\.\d+)?|\.\d+)")
_AFTER_LETTER = r"(?:[.):,]|\W*$)"  # no other character: a word may follow the article A
# Within a sentence. After a colon or a line break, an A before a word may be the article.
_BEFORE_LETTER = r"(?:[^\w.!?:\n]{0,5}|[^\w.!?]{0,6}(?!A\s+(?!(?:and|as|because|is|or|since)\b)[a-z]))"
_ANSWER = r"answer(?:\s+is)?(?:\s+option|\s+choice)?"
_OPTION = r"(?:option|choice)(?:\s+is)?"
_CHOICE = r"(?:choose|chose|pick|select|go(?:ing)?\s+with)"
_IT_IS = r"(?:it(?:\s+is|'s)|(?:should|must)\s+be|meant?|make\s+(?:that|it))"
_CORRECTION = re.compile(
    r"(?i)\b(?:wait|no|actually|correction|sorry|oops)\s*[,.:;!\u2013\u2014]"
    r"|\bactually\s+(?=(?:it(?:'s|\s+is)\s+)?(?-i:[A-Z])(?![\w']))"
)
_IS_CHOSEN = r"\s+is\s+(?:correct|right|(?:the|my)\s+(?:(?:best|correct|final|right)\s+)?(?:answer|choice|option))\b"
_BEFORE_OPTION = re.compile(rf"{_ANSWER}[\s:*\"'$(]{{0,6}}")
_AFTER_OPTION = re.compile(r"[\s.,;:!?)\"'*$]{0,10}(?:$|\n)|[.,;:!?)\"'*$](?=\D)|\s+(?:as|because|since)\b")


def parse_mmlu_response(example: Mapping[str, Any], output: str) -> str | None:
    r"""Return the letter of the option that ``output`` chooses, or None.

    ``example`` has the ``options`` (or ``choices``). In order: the choice of the last ``\boxed{…}``; a letter after the
    last ``wait,``, ``no:`` and the like; the last letter after ``answer is``, ``answer:`` and the like, the text of an
    option there, the last letter after ``option`` or ``choice``, or after ``choose`` and the like; a letter at the
    start, or alone; the text of an option alone; the only letter before a punctuation mark, the end or ``is correct``.
    Several letters, as in ``answer: A or B``, are no choice.
    """
    boxed = extract_boxed(output)
    if boxed is not None and (letter := parse_mmlu_response(example, boxed)):
        return letter
    options = [_bare(str(option)) for option in example.get("options") or example.get("choices") or "ABCD"]
    letters = "".join(chr(ord("A") + index) for index in range(len(options)))
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", output)
    *before, correction = _CORRECTION.split(text)
    if before:
        for name in (_ANSWER, _IT_IS):
            if stated := _find_stated(name, letters, correction):
                return stated[-1]
        if leading := re.match(rf"\W{{0,5}}([{letters}])(?:{_AFTER_LETTER}|\s+is\b)", correction):
            return leading[1]
    is_undecided = (
        re.search(rf"(?i:{_ANSWER}){_BEFORE_LETTER}{_letter(letters)}{_or_another(letters)}", text) is not None
    )
    for name in (_ANSWER, _CHOICE) if is_undecided else (_ANSWER, _OPTION, _CHOICE):
        if stated := _find_stated(name, letters, text):
            return stated[-1]
        if name == _ANSWER and (letter := _find_stated_option(options, letters, text)):
            return letter
    if is_undecided:
        return None
    if alone := re.fullmatch(rf"(?i)\(([{letters}])\)\.?|([{letters}])[.)]?", text.strip()):
        return alone[alone.lastindex or 0].upper()
    if leading := re.match(rf"\W{{0,5}}([{letters}])(?:{_AFTER_LETTER}|{_IS_CHOSEN})", text):
        return leading[1]
    if text.strip() and options.count(bare := _bare(text)) == 1:
        return letters[options.index(bare)]
    chosen = rf"(?:{_AFTER_LETTER}|{_IS_CHOSEN}|{_or_another(letters)})"
    mentioned = set(re.findall(rf"(?<![\w'])([{letters}])(?={chosen})", text))
    return mentioned.pop() if len(mentioned) == 1 else None


def _letter(letters: str) -> str:
    """Return a pattern of a letter. A small a or i is one only before a mark or the end, else it is a word."""
    small = letters.lower()
    words = "".join(letter for letter in small if letter in "ai")
    others = "".join(letter for letter in small if letter not in "ai")
    return rf"([{letters}{others}](?![\w'])|[{words}](?=[.):,*$\n]|\W*$))"


def _or_another(letters: str) -> str:
    """Return a pattern of another letter, or of several, after a first."""
    joint = r"\W{0,4}(?:\b(?:or|and)\b|/)\W{0,4}(?:(?i:option|choice)\W{1,4})?"
    return rf"(?:,\s?[{letters}](?![\w'])){{0,9}}{joint}[{letters}{letters.lower()}](?![\w'])"


def _find_stated(name: str, letters: str, text: str) -> list[str]:
    """Return the letters right after a name such as ``answer``, in capitals, but not those with an alternative."""
    found = re.findall(rf"(?i:{name}){_BEFORE_LETTER}{_letter(letters)}(?!{_or_another(letters)})", text)
    return [letter.upper() for letter in found]


def _find_stated_option(options: list[str], letters: str, text: str) -> str | None:
    """Return the letter of the option whose text is the last after ``answer is`` and the like, or None."""
    text = text.lower()
    unique = sorted((option for option in options if option and options.count(option) == 1), key=len, reverse=True)
    for position in reversed([match.end() for match in _BEFORE_OPTION.finditer(text)]):
        for option in unique:
            if text.startswith(option, position) and _AFTER_OPTION.match(text, position + len(option)):
                return letters[options.index(option)]
    return None


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
    for brace in re.finditer(r"\\?[{}]", rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} are characters
        if not depth:
            return rest[: brace.start()]
    return None


def extract_r1_zero(response: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>`` that follows a ``</think>``, or None.

    Any white space may lie between the tags. The prompt may have written ``<think>`` already.
    """
    _, *after = re.split(r"</think>\s*<answer>", response)
    answer, mark, _ = after[-1].partition("</answer>") if after else ("", "", "")
    return answer.strip() if mark else None
