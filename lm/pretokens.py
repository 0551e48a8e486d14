"""Cutting text into pretokens: the GPT-2 pattern, special tokens, and the places where text may be cut in two.

Sources: Radford et al. 2019 (GPT-2's pattern); CS336 assignment 1 (section 2.4).
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import regex

from lm.errors import UserError

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

END_OF_TEXT = "<|endoftext|>"

_REPEATED = regex.compile(r"\{(\d*)(?:,(\d*))?\}")
_MOST_REPEATS = (
    100_000  # in each other; the module regex unrolls them, and takes all memory for what is a short pattern
)
_LAST_SPACE = regex.compile(r"(?r)(?<=\S)\s")  # searched from the end


@lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    """Compile a pretoken pattern; raises UserError with the position when it is not a regular expression, or where it
    repeats things too often."""
    repeats = 1
    for numbers in _REPEATED.findall(pattern):
        repeats *= max([1, *(int(number[:9]) for number in numbers if number)])
        if repeats > _MOST_REPEATS:
            raise UserError(f"The pretoken pattern {pattern!r} repeats things more than {_MOST_REPEATS:,} times.")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UserError(f"The pretoken pattern {pattern!r} is not a regular expression: {error}.") from None


def check_special_tokens(special_tokens: Sequence[str]) -> None:
    """Raise UserError for an empty special token, two equal ones, or one that has no UTF-8 bytes."""
    for i, token in enumerate(special_tokens):
        if not token:
            raise UserError(f"Special token number {i + 1} is empty; remove it or give it a text.")
        if token in special_tokens[:i]:
            raise UserError(f"The special token {token!r} is given twice; name it once.")
        if any("\ud800" <= character <= "\udfff" for character in token):
            raise UserError(
                f"The special token {token!r} has a lone surrogate, which no bytes stand for; leave it out."
            )


@lru_cache(maxsize=64)
def special_pattern(special_tokens: tuple[str, ...]) -> "regex.Pattern[str]":
    """A pattern that finds any of ``special_tokens`` (at least one), the longest where several begin at one place."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, longest_first)))


def split_special(text: str, special_tokens: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield (piece, is_special) over ``text`` in order; the pieces join to ``text``, and none is empty."""
    start = 0
    if special_tokens:
        for match in special_pattern(tuple(special_tokens)).finditer(text):
            if match.start() > start:
                yield text[start : match.start()], False
            yield match.group(), True
            start = match.end()
    if start < len(text):
        yield text[start:], False


def pretokenize(text: str, pattern: str = GPT2_PATTERN) -> Iterator[str]:
    """Yield the pretokens of ``text``, which holds no special tokens. Characters that no alternative of a custom
    pattern matches become pretokens of their own, so that nothing is ever lost."""
    end = 0
    for match in compile_pattern(pattern).finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        end = match.end()
        if match.group():
            yield match.group()
    if end < len(text):
        yield text[end:]


def last_cut(text: str, special_tokens: Sequence[str], pattern: str = GPT2_PATTERN) -> int:
    """Return the last position at which ``text``, the start of a longer text, can be cut without changing a pretoken.

    Such places are the end of a special token and, with the GPT-2 pattern only, white space that follows something
    else. 0 when there is none. A special token that may go on past the end of ``text`` is left whole.
    """
    # A special token that begins before ``limit`` cannot end past the text, so it has been seen whole.
    limit = max(0, len(text) - max(map(len, special_tokens), default=1) + 1)
    cut = 0
    for match in special_pattern(tuple(special_tokens)).finditer(text) if special_tokens else ():
        if match.start() < limit:
            cut = match.end()
    if pattern == GPT2_PATTERN and cut < limit:  # white space inside a special token is no place to cut
        space = _LAST_SPACE.search(text, cut, limit)
        cut = space.start() if space else cut
    return cut


def cut_safely(
    blocks: Iterable[str], special_tokens: Sequence[str], pattern: str = GPT2_PATTERN, size: int = 4096
) -> Iterator[str]:
    """Join ``blocks`` and cut them anew into pieces of about ``size`` characters that can be pretokenized one by one.

    A piece grows past ``size`` while there is no safe place to cut (see :func:`last_cut`).
    """
    held: list[str] = []
    length, wanted = 0, size
    for block in blocks:
        held.append(block)
        length += len(block)
        if length >= wanted:
            text = "".join(held)
            cut = last_cut(text, special_tokens, pattern)
            if cut:
                yield text[:cut]
            held, length = [text[cut:]], len(text) - cut
            wanted = max(size, 2 * length)  # doubling keeps a text without a cut from being searched again and again
    if rest := "".join(held):
        yield rest
