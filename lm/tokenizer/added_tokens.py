"""Added tokens: tokens that are searched for in a text before it is pretokenized, with Hugging Face's flags.

The behaviour is that of the library ``tokenizers``, so that a tokenizer.json gives the same ids here and there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product
from operator import itemgetter
from typing import Any

import regex

from lm.common.errors import UserError
from lm.text.normalize import is_normalized, normalize_blocks, normalize_text
from lm.text.pretokenize import check_special_tokens

_MAX_PIECE_SIZES = 4  # a longer text without a cut is yielded in blocks
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_WORD_CHARACTER = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200c\u200d]")  # Unicode's UTS 18


@dataclass(frozen=True)
class AddedToken:
    """A token that is searched for in the text before pretokenization, with the flags of ``tokenizers.AddedToken``."""

    content: str
    """Text of the token."""
    special: bool = True
    """The token is control, not text: it can be encoded as plain text, and ends a generation."""
    lstrip: bool = False
    """The token takes the white space before it."""
    rstrip: bool = False
    """The token takes the white space after it."""
    single_word: bool = False
    """The token is not found next to a letter, mark, digit or underscore."""
    normalized: bool = False
    """The token is searched for in the normalized text between the tokens that are not ``normalized``."""
    id: int | None = None
    """Token id; None: the id of the token's bytes in the vocabulary, or a new one."""

    @property
    def has_context(self) -> bool:
        """Whether the text around the token matters."""
        return self.lstrip or self.rstrip or self.single_word


def list_added_tokens(special_tokens: Sequence[str], added_tokens: Sequence[AddedToken]) -> list[AddedToken]:
    """Return the tokens of both, the special ones first. An added token replaces a special token of the same text.

    Raises UserError for an empty, repeated or invalid text.
    """
    check_special_tokens(special_tokens)
    given = {token.content: token for token in added_tokens}
    contents = [*special_tokens, *(token.content for token in added_tokens if token.content not in special_tokens)]
    check_special_tokens(contents)
    tokens = [given.get(content, AddedToken(content)) for content in contents]
    return sorted(tokens, key=lambda token: not token.special)


def number_tokens(vocab: dict[int, bytes], tokens: Sequence[AddedToken]) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the ids by bytes and those of the added ``tokens`` by text; append tokens that have none to ``vocab``.

    If two ids have the bytes of an added token, the higher id is the added token. Ordinary text gets the lower one.
    Raises UserError if the id of an added token is that of other bytes.
    """
    own_ids = {token.id for token in tokens if token.id is not None}
    last_ids = {token: token_id for token_id, token in vocab.items() if token_id not in own_ids}
    contents = {token.content.encode() for token in tokens}
    first_ids = {token: i for i, token in reversed(vocab.items()) if i not in own_ids and token in contents}
    ids, added_ids = last_ids | first_ids, dict[str, int]()
    for token in tokens:
        data = token.content.encode()
        token_id = last_ids.get(data) if token.id is None else token.id
        if token_id is None:
            token_id = max(vocab, default=-1) + 1
        if vocab.setdefault(token_id, data) != data:
            raise UserError(
                f"The id {token_id} of the added token {token.content!r} is that of {vocab[token_id]!r}; "
                "choose another id."
            )
        added_ids[token.content] = token_id
        ids.setdefault(data, token_id)
    return ids, added_ids


def needs_no_context(tokens: Sequence[AddedToken], normalizer: str | None) -> bool:
    """Return whether one search for all tokens in the raw text, leftmost and longest first, finds the same."""
    normalized = [token.content for token in tokens if token.normalized]
    others = [token.content for token in tokens if not token.normalized]
    overlaps = any(
        other in token or any(other.startswith(token[i:]) for i in range(1, len(token)))
        for token, other in product(normalized, others)
    )
    return not (overlaps or (normalized and normalizer) or any(token.has_context for token in tokens))


def split_and_normalize(
    blocks: Iterable[str], tokens: Sequence[AddedToken], normalizer: str | None
) -> Iterator[tuple[bool, Iterator[Any]]]:
    """Split the concatenated ``blocks`` at their added tokens and normalize the text between them.

    Yields runs: (True, the strings of a text without a token) or (False, added tokens one directly after the other).
    """
    raw_tokens = [token for token in tokens if not token.normalized]
    normalized_tokens = [token for token in tokens if token.normalized]

    def split() -> Iterator[str | AddedToken]:
        for is_text, run in _group(split_added_tokens(blocks, raw_tokens)):
            if is_text:
                yield from split_added_tokens(normalize_blocks(run, normalizer), normalized_tokens, normalizer)
            else:
                yield from run

    return _group(split())


def _group(parts: Iterable[Any]) -> Iterator[tuple[bool, Iterator[Any]]]:
    return groupby(parts, key=lambda part: isinstance(part, str))


def split_added_tokens(
    blocks: Iterable[str], tokens: Sequence[AddedToken], normalizer: str | None = None
) -> Iterator[str | AddedToken]:
    """Split the concatenated ``blocks`` at added tokens, the leftmost first and of several the longest.

    ``normalizer`` is applied to the content of the tokens. The text in memory is bounded, except for white space that
    a token may take. After a rejected ``single_word`` match, the search goes on behind it. A token whose text was taken
    by ``lstrip`` or ``rstrip`` of another is skipped.
    """
    by_text = {normalize_text(token.content, normalizer): token for token in reversed(tokens)}
    if not by_text:
        yield from filter(None, blocks)
        return
    search = regex.compile("|".join(map(regex.escape, sorted(by_text, key=len, reverse=True))))
    longest, has_lstrip = max(map(len, by_text)), any(token.lstrip for token in tokens)
    text, start, position, min_length = "", 0, 0, 0  # of ``text``: first index not yielded, first index not searched
    for block in chain(blocks, [None]):
        text += block or ""
        if block is not None and len(text) < min_length:
            continue
        # A token that begins before ``limit`` is certain: ``text`` has all of it, and the character after it.
        limit = len(text) if block is None else max(position, len(text) - longest)
        for match in search.finditer(text, position):
            begin, end = match.span()
            if begin >= limit:
                break
            token = by_text[match.group()]
            if token.single_word and (
                _is_word_character(text[begin - 1 : begin]) or _is_word_character(text[end : end + 1])
            ):
                position = end
                continue
            stop = end
            while token.rstrip and stop < len(text) and text[stop] in _WHITE_SPACE:
                stop += 1
            if stop == len(text) and token.rstrip and block is not None:
                limit = begin  # more white space may follow
                break
            if token.lstrip:
                while begin > start and text[begin - 1] in _WHITE_SPACE:
                    begin -= 1
                begin = max(begin, start)
            if begin >= stop:  # the token before took all of its text
                position = end
                continue
            if begin > start:
                yield text[start:begin]
            yield token
            start, position = stop, end
        position = max(position, limit)
        sure = text[start:limit].rstrip(_WHITE_SPACE) if has_lstrip and block is not None else text[start:limit]
        if sure:
            yield sure
            start += len(sure)
        kept = max(0, min(start, position) - 1)  # one character before, for ``single_word``
        text, start, position = text[kept:], start - kept, position - kept
        min_length = 2 * len(text)  # doubling bounds repeated searches of white space


class PieceSplitter:
    """Splits text into pieces, simple ones and others, at ends of added tokens.

    In a simple piece, one search for all added tokens, without normalization, gives the same ids. Most text is
    normalized already, and most added tokens with flags are rare. A simple piece needs one call of the compiled
    encoder, another one a call for each run between two added tokens.
    """

    def __init__(self, tokens: Sequence[AddedToken], normalizer: str | None) -> None:
        self._normalizer = normalizer
        cuts, context = _find_cuts_and_context_texts(tokens, normalizer)
        contents = [token.content for token in tokens]
        self._find_token = _search_any({*contents, *(normalize_text(content, normalizer) for content in contents)})
        self._find_context = _search_any(context)
        self._longest = max(map(len, cuts), default=0)
        any_cut = "|".join(map(regex.escape, cuts))
        self._first_cut, self._last_cut = regex.compile(any_cut), regex.compile(f"(?r){any_cut}")

    def split(self, blocks: Iterable[str], size: int) -> Iterator[tuple[bool, Iterable[str]]]:
        """Split the concatenated ``blocks``; yield (is simple, the piece in blocks). A simple piece is normalized.

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
        """Split documents into runs, simple ones and others. The text of a yield is one block."""
        if is_normalized(text, self._normalizer) and not self._find_context(text):
            yield True, [text]
            return
        for is_simple, run in groupby(self._documents(text), key=itemgetter(0)):
            yield is_simple, ["".join(document for _, document in run)]

    def _documents(self, text: str) -> Iterator[tuple[bool, str]]:
        start = 0
        for match in self._first_cut.finditer(text):
            yield self._simplify(text[start : match.start()], match.group())
            start = match.end()
        yield self._simplify(text[start:], "")

    def _simplify(self, text: str, cut: str) -> tuple[bool, str]:
        """Normalize a document that has no added token before the ``cut``; return (is simple, document)."""
        normalized = normalize_text(text, self._normalizer)
        if normalized == text:
            return not self._find_context(text), text + cut
        has_token = self._find_token(text) or self._find_token(normalized)
        return not has_token, (text if has_token else normalized) + cut


def _search_any(texts: Iterable[str]) -> Callable[[str], Any]:
    """Return a function that finds one of the ``texts`` in a text."""
    either = "|".join(map(regex.escape, texts))
    return regex.compile(either).search if either else lambda text: None


def _find_cuts_and_context_texts(tokens: Sequence[AddedToken], normalizer: str | None) -> tuple[list[str], list[str]]:
    """Return the texts after which a text can be cut, and those that one search for all tokens may not find rightly.

    A token is a cut if it is found wherever its text occurs: no token shares characters with it or looks past its end.
    """
    apart = _texts_apart([token.content for token in tokens])
    cuts, context = list[str](), list[str]()
    for token in tokens:
        content, is_apart = token.content, token.content in apart
        if token.has_context or (token.normalized and (normalizer or not is_apart)):
            context += [content, normalize_text(content, normalizer)]
        elif is_apart and content == content.strip() and not _is_word_character(content[-1]):
            cuts.append(content)
    return cuts, context


def are_apart(tokens: Sequence[AddedToken]) -> bool:
    """Return whether each token is found wherever its text occurs: no two can share characters."""
    return len(_texts_apart([token.content for token in tokens])) == len(tokens)


def _texts_apart(contents: Sequence[str]) -> set[str]:
    """Return the ``contents`` that can share characters neither with another nor with themselves."""
    beginnings = {content[:i] for content in contents for i in range(1, len(content))}
    ends = {content[i:] for content in contents for i in range(1, len(content))}

    def is_apart(content: str) -> bool:
        overlaps = any(content[:i] in ends or content[i:] in beginnings for i in range(1, len(content)))
        return not overlaps and not any(content in other or other in content for other in contents if other != content)

    return set(filter(is_apart, contents))


def _is_word_character(character: str) -> bool:
    """Return whether a character is a letter, mark, digit or underscore; "" is not."""
    return _WORD_CHARACTER.match(character) is not None
