"""Pieces of text in which one search for all added tokens, without normalization, gives the same ids.

Most text is normalized already, and most added tokens with flags are rare. Such pieces need one call of the compiled
encoder; the others need a call for each run between two added tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import regex

from lm.text.normalize import is_normalized, normalize_text
from lm.tokenizer.added_tokens import AddedToken, is_word_character

_MAX_PIECE_SIZES = 4  # a longer text without a cut is yielded in blocks


class PlainPieces:
    """Splits text at ends of added tokens, and normalizes documents that have no other added token."""

    def __init__(self, tokens: Sequence[AddedToken], normalizer: str | None) -> None:
        self._normalizer = normalizer
        cuts, unplain = _find_cuts_and_unplain_texts(tokens, normalizer)
        contents = [token.content for token in tokens]
        self._find_token = _search_any({*contents, *(normalize_text(content, normalizer) for content in contents)})
        self._find_unplain = _search_any(unplain)
        self._longest = max(map(len, cuts), default=0)
        any_cut = "|".join(map(regex.escape, cuts))
        self._first_cut, self._last_cut = regex.compile(any_cut), regex.compile(f"(?r){any_cut}")

    def split(self, blocks: Iterable[str], size: int) -> Iterator[tuple[bool, Iterable[str]]]:
        """Split the concatenated ``blocks``; yield (is plain, the piece in blocks). A plain piece is normalized.

        A piece has about ``size`` characters. The caller must read its blocks before the next piece.
        """
        if not self._longest:
            yield False, blocks
            return
        remaining = iter(blocks)
        pending: list[str] = []
        length, rest = 0, ""  # of ``pending``; the text after the last piece

        def to_first_cut(text: str) -> Iterator[str]:
            nonlocal rest
            for block in remaining:
                text += block
                if match := self._first_cut.search(text):
                    yield text[: match.end()]
                    rest = text[match.end() :]
                    return
                start = max(0, len(text) - self._longest + 1)  # a cut may begin here
                yield text[:start]
                text = text[start:]
            rest = ""
            yield text

        for block in remaining:
            pending.append(block)
            length += len(block)
            if length < size:
                continue
            text = "".join(pending)
            if match := self._last_cut.search(text):
                yield from self._pieces(text[: match.end()])
                rest = text[match.end() :]
            elif length < _MAX_PIECE_SIZES * size:
                continue
            else:
                yield False, to_first_cut(text)
            pending, length = [rest], len(rest)
        yield from self._pieces("".join(pending))

    def _pieces(self, text: str) -> Iterator[tuple[bool, Iterable[str]]]:
        """Split documents into runs, plain ones and others. The text of a yield is one block."""
        if is_normalized(text, self._normalizer) and not self._find_unplain(text):
            yield True, [text]
            return
        for is_plain, run in groupby(self._documents(text), key=itemgetter(0)):
            yield is_plain, ["".join(document for _, document in run)]

    def _documents(self, text: str) -> Iterator[tuple[bool, str]]:
        start = 0
        for match in self._first_cut.finditer(text):
            yield self._make_plain(text[start : match.start()], match.group())
            start = match.end()
        yield self._make_plain(text[start:], "")

    def _make_plain(self, text: str, cut: str) -> tuple[bool, str]:
        """Normalize a document that has no added token before the ``cut``; return (is plain, document)."""
        normalized = normalize_text(text, self._normalizer)
        if normalized == text:
            return not self._find_unplain(text), text + cut
        has_token = self._find_token(text) or self._find_token(normalized)
        return not has_token, (text if has_token else normalized) + cut


def _search_any(texts: Iterable[str]) -> Callable[[str], Any]:
    """Return a function that finds one of the ``texts`` in a text."""
    either = "|".join(map(regex.escape, texts))
    return regex.compile(either).search if either else lambda text: None


def _find_cuts_and_unplain_texts(tokens: Sequence[AddedToken], normalizer: str | None) -> tuple[list[str], list[str]]:
    """Return the texts after which a text can be cut, and those that one search for all tokens may not find rightly.

    A token is a cut if it is found wherever its text occurs: no token shares characters with it or looks past its end.
    """
    contents = [token.content for token in tokens]
    beginnings = {content[:i] for content in contents for i in range(1, len(content))}
    ends = {content[i:] for content in contents for i in range(1, len(content))}

    def is_apart(content: str) -> bool:
        overlaps = any(content[:i] in ends or content[i:] in beginnings for i in range(1, len(content)))
        return not overlaps and not any(content in other or other in content for other in contents if other != content)

    cuts, unplain = list[str](), list[str]()
    for token in tokens:
        content, is_apart_token = token.content, is_apart(token.content)
        if token.has_context or (token.normalized and (normalizer or not is_apart_token)):
            unplain += [content, normalize_text(content, normalizer)]
        elif is_apart_token and content == content.strip() and not is_word_character(content[-1]):
            cuts.append(content)
    return cuts, unplain
