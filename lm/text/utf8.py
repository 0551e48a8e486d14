"""UTF-8 decoding and encoding of text in blocks."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from lm.common.errors import InvalidUtf8Error


def decode_utf8_blocks(
    blocks: Iterable[bytes | memoryview],
    name: str,
    invalid_utf8: str = "error",
    add_replaced: Callable[[int], None] = lambda count: None,
    offset: int = 0,
) -> Iterator[str]:
    """Decode blocks of UTF-8 bytes; a character may span two blocks.

    Invalid bytes raise InvalidUtf8Error with their offset in the text ``name``, in which the blocks begin at
    ``offset``. With ``invalid_utf8="replace"`` they become U+FFFD, and ``add_replaced`` gets their number.
    """
    pending = b""
    for block in chain(blocks, [None]):  # None: the end, at which pending bytes are invalid
        is_last = block is None
        data = pending + (block or b"")
        try:
            text, used = codecs.utf_8_decode(data, "strict", is_last)
        except UnicodeDecodeError as error:
            if invalid_utf8 == "error":
                raise InvalidUtf8Error(data[error.start], offset + error.start, name) from None
            text, used = codecs.utf_8_decode(data, "replace", is_last)
            add_replaced(text.count("\N{REPLACEMENT CHARACTER}") - data[:used].count(b"\xef\xbf\xbd"))
        pending = data[used:]
        offset += used
        if text:
            yield text


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs to one character and replace each lone surrogate, which UTF-8 lacks, by U+FFFD."""
    try:
        text.encode()  # faster than a conversion, and most texts have none
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encode_utf8(text: str) -> bytes:
    """Encode ``text`` as UTF-8 after :func:`replace_surrogates`."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_surrogates(text).encode()


def encode_utf8_blocks(texts: Iterable[str]) -> Iterator[bytes]:
    """Encode the concatenation of ``texts`` like :func:`encode_utf8`; a surrogate pair may span two texts."""
    pending = ""
    for text in texts:
        text = pending + text
        pending = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        yield encode_utf8(text.removesuffix(pending))
    if pending:
        yield encode_utf8(pending)
