"""NFC of UTF-8 in blocks, in one pass over the bytes: for the usual case that most text is in NFC already, and that all
added tokens are of ASCII.

The reference is :func:`lm.tokenizer.added_tokens.split_and_normalize`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from lm.common.errors import InvalidUtf8Error
from lm.kernels.composed import find_uncomposed
from lm.kernels.jit import log_compilation
from lm.text.normalize import normalize_text
from lm.tokenizer.added_tokens import AddedToken, are_apart

_SPAN = 1 << 10  # bytes that Python normalizes at once
_MADE_BY_NFC = frozenset("K;`")  # of the Kelvin sign, the Greek question mark and the varia: no other ASCII is made
# Before these characters a text can be cut: NFC joins neither ASCII nor CJK ideographs to the text before them.
_CUT = re.compile(rb"[\x00-\x7f]|\xe4[\xb8-\xbf][\x80-\xbf]|[\xe5-\xe9][\x80-\xbf]{2}")


def can_compose(tokens: Sequence[AddedToken]) -> bool:
    """Return whether :class:`TextComposer` finds the text between such tokens: NFC neither makes nor breaks one."""
    contents = [token.content for token in tokens]
    is_ascii = all(content.isascii() and _MADE_BY_NFC.isdisjoint(content) for content in contents)
    return is_ascii and are_apart(tokens)


class TextComposer:
    """Brings the text between ``tokens`` into NFC. The tokens must be as in :func:`can_compose`."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._tokens = [token.content.encode() for token in tokens]
        self._longest = max(map(len, self._tokens), default=1)

    @cached_property
    def _find_token(self) -> Callable[[bytes], Iterable[re.Match[bytes]]]:
        """Return a function that finds the tokens before other characters than ASCII."""
        either = b"|".join(map(re.escape, self._tokens)) or b"(?!)"
        return re.compile(b"(?:%s)(?=[\x80-\xff])" % either).finditer

    def compose(self, blocks: Iterable[bytes]) -> Iterator[bytes | memoryview]:
        """Yield the concatenated ``blocks`` of UTF-8 with the text between tokens in NFC.

        Invalid UTF-8 passes, or raises InvalidUtf8Error where its place in the result would be another.
        """
        pending, offset, before = b"", 0, b""  # text that is not yielded, its offset in the text, and the text before
        is_open, min_length = False, 0  # whether ``pending`` may change, and how long it must be to be looked at again
        is_shifted = False  # whether the result has other offsets than the text
        for block in chain(blocks, [None]):
            is_last, data = block is None, block or b""
            if pending and (is_open or is_last or data[:1] >= b"\x80"):
                data = pending + data
            elif pending:  # the usual case: no copy of the block
                if is_shifted:
                    _decode(pending, offset)
                yield pending
                offset, before = offset + len(pending), (before + pending)[-self._longest :]
            if len(data) < min_length and not is_last:
                pending = data
                continue
            end = len(data)
            start = position = 0  # of what is not yielded, and of what is not looked at
            while is_open := (found := _find_uncomposed(data, position)) < end:
                first = _character_start(data, found) if found > start else found
                cut = _CUT.search(data, found + _SPAN)
                if not cut and not is_last:
                    break
                position = cut.start() if cut else end
                context = (before + data[max(0, first - self._longest) : first])[-self._longest :]
                span = data[first:position]
                composed = self._compose(span, offset + first, context)
                if composed != span:
                    if is_shifted:
                        _decode(data[start:first], offset + start)
                    yield memoryview(data)[start:first]
                    yield composed
                    is_shifted |= len(composed) != len(span)
                    start = position
            held = end if is_last else max(start, first if is_open else _character_start(data, end))
            if is_shifted:
                _decode(data[start:held], offset + start)
            yield memoryview(data)[start:held]
            offset, before = offset + held, (before + data[max(0, held - self._longest) : held])[-self._longest :]
            pending = data[held:]
            min_length = 2 * len(pending) if len(pending) > 2 * _SPAN else 0  # doubling bounds repeated searches

    def _compose(self, span: bytes, offset: int, context: bytes) -> bytes:
        """Return the NFC of a part of the text, in which no token is joined to the text after it.

        ``context`` is the text before: the first byte of the span may be the last of a token.
        """
        text = _decode(span, offset)
        if normalize_text(text, "NFC") == text:
            return span
        ends = (token.end() - len(context) for token in self._find_token(context + span))
        cuts = [0, *(end for end in ends if end > 0), len(span)]
        return b"".join(normalize_text(span[i:j].decode(), "NFC").encode() for i, j in pairwise(cuts))


def _find_uncomposed(data: bytes, start: int) -> int:
    """Return :func:`lm.kernels.composed.find_uncomposed` from ``start`` to the end."""
    if data.isascii():
        return len(data)
    with log_compilation("NFC"):
        return find_uncomposed(np.frombuffer(data, np.uint8), start, len(data))


def _character_start(data: bytes, end: int) -> int:
    """Return the start of the last character of ``data[:end]``."""
    start = end - 1
    while start > max(0, end - 4) and 0x80 <= data[start] < 0xC0:
        start -= 1
    return start


def _decode(data: bytes, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidUtf8Error(data[error.start], offset + error.start, "the text") from None
