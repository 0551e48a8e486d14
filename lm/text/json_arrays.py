"""JSON arrays, such as the files of Alpaca and ShareGPT, read value by value without the whole file in memory."""

import json
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterable, Iterator
from typing import Any

from lm.common.errors import UserError

_WHITESPACE = " \t\n\r"
# The second reads an integer of more digits than Python converts (4,300) as a float.
_DECODERS = (json.JSONDecoder(), json.JSONDecoder(parse_int=float))


def begins_json_array(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a JSON array."""
    return head.removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def split_json_array(blocks: Iterable[bytes], url: str, max_characters: int) -> Iterator[tuple[Any, str]]:
    """Yield (value, its JSON text) for each value of a JSON array, whose bytes ``blocks`` are.

    Raises UserError, which names the row, if the array is damaged or has no end, text follows it, or a value has more
    than ``max_characters``: after a damaged value, nothing says where the next one begins.
    """
    text = _Text(blocks, url)
    text.skip("[")
    if text.next_character() == "]":
        text.skip("]")
    else:
        while True:
            yield text.read_value(max_characters)
            if text.next_character() == "]":
                break
            text.skip(",")
        text.skip("]")
    if text.next_character():
        raise text.error("text follows the end of the array; a file is one array, or has one object a line")


class _Text:
    """The text of a file, from its first value that is not read yet."""

    def __init__(self, blocks: Iterable[bytes], url: str) -> None:
        self._blocks, self._url = iter(blocks), url
        self._decoder = getincrementaldecoder("utf-8-sig")()
        self._buffer, self._start, self._row, self._has_ended = "", 0, 0, False

    def error(self, reason: str) -> UserError:
        """Return the error of the array, with the row that is read or was read last."""
        return UserError(f"{self._url}, row {max(1, self._row):,}: {reason}.")

    def _read(self, characters: int = 1) -> bool:
        """Read at least so many more characters. Return whether there are any."""
        parts, size = [self._buffer[self._start :]], 0
        while size < characters and not self._has_ended:
            block = next(self._blocks, None)
            self._has_ended = block is None
            try:
                parts.append(self._decoder.decode(block or b"", final=self._has_ended))
            except UnicodeDecodeError as error:
                reason = f"the text after it is not UTF-8: byte 0x{error.object[error.start]:02x}. Convert the file"
                raise self.error(reason) from None
            size += len(parts[-1])
        self._buffer, self._start = "".join(parts), 0
        return size > 0

    def next_character(self) -> str:
        """Return the next character that is no whitespace, or an empty text at the end."""
        while True:
            while self._start < len(self._buffer):
                if self._buffer[self._start] not in _WHITESPACE:
                    return self._buffer[self._start]
                self._start += 1
            if not self._read():
                return ""

    def skip(self, character: str) -> None:
        """Skip a character that must come next."""
        if (found := self.next_character()) != character:
            what = f"{found!r} follows the value" if found else "the file ends within the array"
            raise self.error(f"{what}; {character!r} must come next. Repair the file, or write it again")
        self._start += 1

    def read_value(self, max_characters: int) -> tuple[Any, str]:
        """Return the next value and its text."""
        self._row += 1
        self.next_character()
        while True:
            try:
                value, end = self._decode()
            except json.JSONDecodeError as error:  # of a value that is damaged, or not read to its end yet
                problem = f"not JSON: {error.msg} at character {error.pos - self._start:,} of the value"
            except (ValueError, RecursionError) as error:
                raise self.error(f"not JSON: {error}") from None
            else:
                if end + 2 >= len(self._buffer) and not self._has_ended:  # a number may go on, as 1e+ does
                    self._read()
                    continue
                text, self._start = self._buffer[self._start : end], end
                if len(text) > max_characters:
                    raise self.error(f"the value is longer than {max_characters:,} characters")
                return value, text
            if (size := len(self._buffer) - self._start) > max_characters:
                raise self.error(f"{problem}, or the value is longer than {max_characters:,} characters")
            if not self._read(size):  # twice as much, because the value is decoded from its beginning again
                raise self.error(f"{problem}. Repair the file, or write it again")

    def _decode(self) -> tuple[Any, int]:
        try:
            return _DECODERS[0].raw_decode(self._buffer, self._start)
        except json.JSONDecodeError:
            raise
        except ValueError:
            return _DECODERS[1].raw_decode(self._buffer, self._start)
