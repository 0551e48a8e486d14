"""GPT-2's tokenizer files, vocab.json and merges.txt, and a readable vocab.txt."""

import codecs
import json
from collections.abc import Container, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.files.json import read_json


def _byte_characters() -> str:
    """Return GPT-2's printable character of each byte: printable Latin-1 as is, other bytes from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256))


GPT2_ALPHABET = _byte_characters()
_CHARACTER_TO_BYTE = {ord(character): byte for byte, character in enumerate(GPT2_ALPHABET)}


def bytes_to_unicode(token: bytes) -> str:
    """Return a token in GPT-2's printable characters, one per byte: ``b" a"`` → ``"Ġa"``."""
    return codecs.charmap_decode(token, "strict", GPT2_ALPHABET)[0]


def unicode_to_bytes(text: str) -> bytes:
    """Invert :func:`bytes_to_unicode`. Raises UnicodeEncodeError for a character that stands for no byte."""
    return codecs.charmap_encode(text, "strict", _CHARACTER_TO_BYTE)[0]


def read_vocab(path: Path, special_tokens: Iterable[str] = ()) -> dict[int, bytes]:
    """Read GPT-2's vocab.json, which maps token text to id.

    Raises UserError for a malformed file or two tokens with one id. See :func:`parse_vocab`.
    """
    token_ids = read_json(path)
    if not isinstance(token_ids, dict):
        raise UserError(f"{path} is not a vocabulary: expected one JSON object of token: id.")
    return parse_vocab(path, token_ids, set(special_tokens))


def parse_vocab(path: Path, token_ids: dict[str, Any], special_tokens: Container[str]) -> dict[int, bytes]:
    """Return {id: bytes} of {token text: id}, with ``path`` in the errors.

    ``special_tokens``, and tokens with characters outside GPT-2's alphabet, are plain text.
    """
    vocab: dict[int, bytes] = {}
    for text, token_id in token_ids.items():
        if type(token_id) is not int or token_id < 0 or token_id in vocab:  # a bool is no id
            raise UserError(f"{path}: the id of {text!r}, {token_id!r}, is not a whole number used once.")
        is_plain_text = text in special_tokens or not _CHARACTER_TO_BYTE.keys() >= set(map(ord, text))
        try:
            vocab[token_id] = text.encode() if is_plain_text else unicode_to_bytes(text)
        except UnicodeEncodeError:
            raise UserError(f"{path}: {text!r} has a lone surrogate, which UTF-8 cannot encode.") from None
    return vocab


def format_vocab(vocab: dict[int, bytes], added_ids: Mapping[str, int]) -> dict[str, int]:
    """Return {token text: id} in the order of the ids, the added tokens {text: id} as plain text.

    Raises UserError if an added token has the same text as another token.
    """
    texts = {token_id: text for text, token_id in added_ids.items()}
    token_ids: dict[str, int] = {}
    for token_id, token in sorted(vocab.items()):
        text = texts.get(token_id) or bytes_to_unicode(token)
        if text in token_ids:  # e.g. the special token "Ġ" and the byte b" "
            raise UserError(
                f"Tokens {token_ids[text]} and {token_id} are both written as {text!r} in GPT-2's format; "
                "choose another special token."
            )
        token_ids[text] = token_id
    return token_ids


def write_vocab(path: Path, vocab: dict[int, bytes], added_ids: Mapping[str, int]) -> None:
    """Write GPT-2's vocab.json; see :func:`format_vocab`."""
    path.write_text(json.dumps(format_vocab(vocab, added_ids), ensure_ascii=False, indent=0), encoding="utf-8")


def read_merges(path: Path) -> list[tuple[bytes, bytes]]:
    """Read GPT-2's merges.txt: two tokens per line, in the order of the merges, after an optional ``#version`` line.

    Raises UserError for an unreadable file or a malformed line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as merges: {error}.") from None
    if lines[0].startswith("#version"):
        lines[0] = ""
    return parse_merges(f"{path}, line", lines)


def parse_merges(source: str, lines: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """Return the merges of ``lines`` of two tokens each, without empty lines.

    The UserError for a malformed line names ``source`` and the number of the line, from 1.
    """
    merges = []
    to_bytes = cache(unicode_to_bytes)  # GPT-2's 100,000 merge parts are 15,000 different tokens
    for number, line in enumerate(lines, start=1):
        if line:
            left, _, right = line.partition(" ")
            try:
                merges.append((to_bytes(left), to_bytes(right)))
            except UnicodeEncodeError:
                right = ""
            if not left or not right:
                raise UserError(f"{source} {number}: {line!r} is not two tokens with a space between.")
    return merges


def write_merges(path: Path, merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write GPT-2's merges.txt without a ``#version`` line."""
    lines = (f"{bytes_to_unicode(left)} {bytes_to_unicode(right)}\n" for left, right in merges)
    path.write_text("".join(lines), encoding="utf-8")


def write_vocab_text(path: Path, vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write a readable vocabulary with one line per token: its id, its Python string literal, and the two parts from
    which it was merged."""
    parts = {left + right: (left, right) for left, right in merges}
    with path.open("w", encoding="utf-8") as file:
        for token_id, token in sorted(vocab.items()):
            left, right = parts.get(token, (b"", b""))
            origin = f"  = {_format_token(left)} + {_format_token(right)}" if left else ""
            file.write(f"{token_id:>6}  {_format_token(token)}{origin}\n")


def _format_token(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace"))
