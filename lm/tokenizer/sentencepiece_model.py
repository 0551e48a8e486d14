"""The model in a ``tokenizer.model`` of SentencePiece: its pieces and how it normalizes text.

The file is a message of protobuf; its fields are those of ``sentencepiece_model.proto``.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UserError

SPACE = "▁"
"""Stands for a space in pieces."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types


class Piece(NamedTuple):
    """A piece of the vocabulary; its id is its place."""

    text: str
    score: float
    type: int = NORMAL


class SentencePieceModel(NamedTuple):
    """What encoding needs of a model."""

    pieces: list[Piece]
    is_bpe: bool
    """Or unigram."""
    byte_fallback: bool = False
    """An unknown character becomes the pieces of its bytes."""
    begin: str = "<s>"
    end: str = "</s>"
    unknown_text: str = " \u2047 "
    """Text of the unknown piece."""
    has_character_map: bool = False
    """Text is normalized by a compiled map, such as NFKC's."""
    adds_prefix: bool = True
    """A text begins with a space."""
    removes_spaces: bool = True
    """Spaces at the ends are removed, and several become one."""
    escapes_spaces: bool = True

    def normalize(self, text: str) -> str:
        """Return the text as the pieces have it, if there is no character map."""
        if self.removes_spaces:
            text = re.sub(" +", " ", text.lstrip(" "))
        if not text:
            return ""
        text = " " * self.adds_prefix + text
        if self.escapes_spaces:
            text = text.replace(" ", SPACE)
        return text.rstrip(SPACE if self.escapes_spaces else " ") if self.removes_spaces else text


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a ``tokenizer.model``. Raises UserError if it is damaged, or has features that are not supported."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(f"{path} cannot be read: {error}. It must be a SentencePiece model.") from None
    try:
        return _parse_model(data)
    except (ValueError, struct.error) as error:
        raise UserError(f"{path} cannot be read: {error}. It must be a SentencePiece model.") from None


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces, options = list[Piece](), dict[int, int | bytes]()
    normalizer: dict[int, int | bytes] = {}
    for number, value in _read_fields(data):
        if number == 1 and isinstance(value, bytes):
            fields = dict(_read_fields(value))
            (score,) = struct.unpack("<f", bytes(fields.get(2, bytes(4))))
            pieces.append(Piece(_text(fields.get(1, b"")), score, _integer(fields.get(3, NORMAL))))
        elif number == 2 and isinstance(value, bytes):
            options |= dict(_read_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normalizer |= dict(_read_fields(value))
    kind = _integer(options.get(3, 1))
    if kind not in (1, 2):
        raise ValueError(f"its type {kind} is neither unigram nor BPE")
    if options.get(24):
        raise ValueError("it puts spaces after words (treat_whitespace_as_suffix), which is not supported")
    model = SentencePieceModel(
        pieces,
        kind == 2,
        bool(options.get(35, 0)),
        _text(options.get(46, b"<s>")),
        _text(options.get(47, b"</s>")),
        _text(options.get(44, b" \xe2\x81\x87 ")),
        bool(normalizer.get(2)),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
        bool(normalizer.get(5, 1)),
    )
    if model.is_bpe and any(piece.type == UNUSED for piece in pieces):
        raise ValueError("it is a BPE with unused pieces, which are not supported")
    check_model(model)
    return model


def check_model(model: SentencePieceModel) -> None:
    """Raise ValueError if the pieces of a model are not those of a vocabulary."""
    pieces = model.pieces
    if not pieces or any(not NORMAL <= piece.type <= BYTE for piece in pieces):
        raise ValueError("it has no pieces, or pieces of an unknown type")
    texts = [piece.text for piece in pieces]
    if len(set(texts)) < len(texts) or "" in texts:
        raise ValueError("it has an empty piece, or one piece twice")
    if sum(piece.type == UNKNOWN for piece in pieces) != 1:
        raise ValueError("it has not one piece for unknown text")
    bytes_of_pieces = [piece.text for piece in pieces if piece.type == BYTE]
    if any(not re.fullmatch("<0x[0-9A-F]{2}>", text) for text in bytes_of_pieces):
        raise ValueError("a piece of a byte is not written as <0x0A>")
    if model.byte_fallback and len(bytes_of_pieces) != 256:
        raise ValueError("unknown text becomes bytes, and there are no pieces for all of them")


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message. Raises ValueError if it ends too early."""
    position = 0

    def read_varint() -> int:
        nonlocal position
        value = shift = 0
        while position < len(data) and shift < 64:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of it does not end")

    while position < len(data):
        key = read_varint()
        kind = key & 7
        if kind == _VARINT:
            yield key >> 3, read_varint()
            continue
        sizes = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
        if kind != _BYTES and kind not in sizes:
            raise ValueError("it is no message of protobuf")
        size = read_varint() if kind == _BYTES else sizes[kind]
        if size > len(data) - position:
            raise ValueError("a field of it goes beyond its end")
        yield key >> 3, data[position : position + size]
        position += size


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number of it is a text")
    return value


def _text(value: int | bytes) -> str:
    if not isinstance(value, bytes):
        raise ValueError("a text of it is a number")
    return value.decode()
