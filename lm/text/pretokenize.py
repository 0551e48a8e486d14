"""Pretokenization: the GPT-2 pattern, Chinese words, special tokens, and positions where text can be cut safely.

Sources: Radford et al. 2019 (GPT-2's pattern); CS336 assignment 1 (section 2.4).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib import import_module, metadata
from typing import Any

import regex

from lm.common.errors import UserError

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

END_OF_TEXT = "<|endoftext|>"

# Chinese has no spaces between words, so GPT-2's pattern makes a pretoken of a whole clause, and merges learn pieces
# that cross words. This pattern splits such a pretoken into the words that the library jieba finds.
JIEBA = "jieba"
_CHINESE_RUN = regex.compile(r"( ?)(\p{Han}+)|\P{Han}+")

# A regular expression, or several: each splits the pretokens of the one before. An empty tuple splits nothing.
Pattern = str | tuple[str, ...]

_MAX_REPETITIONS = 100_000  # product over a pattern: the regex module unrolls them and may exhaust memory
_SPACE_FROM_END = regex.compile(r"(?r)(?<=\S)\s")


@lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    """Compile a pretoken pattern. Raises UserError for an invalid regular expression or too many repetitions."""
    repetitions = 1
    for numbers in regex.findall(r"\{(\d*)(?:,(\d*))?\}", pattern):
        repetitions *= max([1, *(int(number[:9]) for number in numbers if number)])
        if repetitions > _MAX_REPETITIONS:
            raise UserError(f"The pretoken pattern {pattern!r} repeats things more than {_MAX_REPETITIONS:,} times.")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise UserError(f"The pretoken pattern {pattern!r} is not a regular expression: {error}.") from None


def check_special_tokens(special_tokens: Sequence[str]) -> None:
    """Raise UserError for one string instead of a list, and for a token that is empty, repeated, or no valid UTF-8."""
    if isinstance(special_tokens, str):
        raise UserError(f"The special tokens are one string; give a list, such as [{special_tokens!r}].")
    known = set[str]()
    for i, token in enumerate(special_tokens):
        if not token:
            raise UserError(f"Special token number {i + 1} is empty; remove it or give it a text.")
        if token in known:
            raise UserError(f"The special token {token!r} is given twice; name it once.")
        known.add(token)
        if any("\ud800" <= character <= "\udfff" for character in token):
            raise UserError(f"The special token {token!r} has a lone surrogate, which UTF-8 cannot encode; remove it.")


@lru_cache(maxsize=64)
def _compile_special_tokens(special_tokens: tuple[str, ...]) -> "regex.Pattern[str]":
    """Compile a pattern that matches any of the special tokens (at least one), the longest at each position."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, longest_first)))


def split_special_tokens(text: str, special_tokens: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Split ``text`` into non-empty pieces and yield (piece, is_special) in order."""
    start = 0
    if special_tokens:
        for match in _compile_special_tokens(tuple(special_tokens)).finditer(text):
            if match.start() > start:
                yield text[start : match.start()], False
            yield match.group(), True
            start = match.end()
    if start < len(text):
        yield text[start:], False


def pretokenize(text: str, pattern: Pattern = GPT2_PATTERN) -> Iterator[str]:
    """Yield the pretokens of ``text``, which must not contain special tokens. No character is lost: text between two
    matches of ``pattern`` becomes a pretoken too. :data:`JIEBA` instead of a pattern also divides the pretokens of
    GPT-2's pattern into Chinese words."""
    if isinstance(pattern, tuple):
        if pattern:
            for pretoken in pretokenize(text, pattern[0]):
                yield from pretokenize(pretoken, pattern[1:])
        elif text:
            yield text
        return
    if pattern == JIEBA:
        for pretoken in pretokenize(text):
            yield from split_chinese_words(pretoken)
        return
    end = 0
    for match in compile_pattern(pattern).finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        end = match.end()
        if match.group():
            yield match.group()
    if end < len(text):
        yield text[end:]


def can_cut_before_space(pattern: Pattern) -> bool:
    """Return whether text can be cut before white space that follows other text without changing a pretoken."""
    return pattern in (GPT2_PATTERN, JIEBA)


def find_safe_cut(text: str, special_tokens: Sequence[str], pattern: Pattern = GPT2_PATTERN) -> int:
    """Return the last index at which ``text``, the start of a longer text, can be cut without changing a pretoken.

    Safe are the end of a special token and, if :func:`can_cut_before_space`, the position before white space that
    follows other text. Returns 0 if there is none. Does not cut after a special token that more text could make longer.
    """
    # A special token that begins before ``limit`` cannot extend past the end of the text.
    limit = max(0, len(text) - max(map(len, special_tokens), default=1) + 1)
    cut = 0
    for match in _compile_special_tokens(tuple(special_tokens)).finditer(text) if special_tokens else ():
        if match.start() < limit:
            cut = match.end()
    if can_cut_before_space(pattern) and cut < limit:
        # Search after ``cut``: white space in a special token is not safe.
        space = _SPACE_FROM_END.search(text, cut, limit)
        cut = space.start() if space else cut
    return cut


def split_at_safe_cuts(
    blocks: Iterable[str], special_tokens: Sequence[str], pattern: Pattern = GPT2_PATTERN, size: int = 4096
) -> Iterator[str]:
    """Regroup ``blocks`` to pieces of about ``size`` characters that can be pretokenized independently.

    A piece grows past ``size`` until it has a safe cut; see :func:`find_safe_cut`.
    """
    return split_at_cuts(blocks, lambda text: find_safe_cut(text, special_tokens, pattern), size)


def split_at_cuts(blocks: Iterable[str], find_cut: Callable[[str], int], size: int = 0) -> Iterator[str]:
    """Regroup ``blocks`` to pieces of at least ``size`` characters that end where ``find_cut(text)`` says; 0: nowhere.

    The last piece has the rest.
    """
    pending: list[str] = []
    length, min_length = 0, size
    for block in blocks:
        pending.append(block)
        length += len(block)
        if length >= min_length:
            text = "".join(pending)
            cut = find_cut(text)
            if cut:
                yield text[:cut]
            pending, length = [text[cut:]], len(text) - cut
            min_length = max(size, 2 * length)  # doubling bounds repeated searches of a text without a cut
    if rest := "".join(pending):
        yield rest


def split_chinese_words(pretoken: str) -> Iterator[str]:
    """Yield the words of each run of Chinese characters in a pretoken of GPT-2's pattern, and the text between runs.

    A space before a run belongs to its first word. Raises UserError if jieba is not installed.
    """
    for run in _CHINESE_RUN.finditer(pretoken):
        space, characters = run.groups()
        if not characters:
            yield run.group()
            continue
        for word in _segmenter().cut(characters):
            yield space + word
            space = ""


def jieba_version() -> str:
    """Return the version of jieba, whose dictionary decides the words. Raises UserError if it is not installed."""
    try:
        return metadata.version("jieba")
    except ImportError:
        raise UserError("tokenizer.pattern jieba needs an extra: pip install 'textmill[jieba]'.") from None


@cache
def _segmenter() -> Any:
    jieba_version()
    segmenter = import_module("jieba").Tokenizer()
    # Without this, jieba would read a file that any user of this machine may have written to the temporary directory.
    segmenter.FREQ, segmenter.total = segmenter.gen_pfdict(segmenter.get_dict_file())
    segmenter.initialized = True
    return segmenter
