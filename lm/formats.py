"""File formats of byte-level BPE tokenizers: GPT-2's vocab.json and merges.txt, Hugging Face's tokenizer.json.

Sources: Radford et al. 2019 (GPT-2's encoder.json, vocab.bpe and byte-to-unicode spelling); the ``tokenizers`` library.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.pretokens import GPT2_PATTERN


def _gpt2_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself where it is printable Latin-1, else the next from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_CHARACTERS = _gpt2_alphabet()
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def spell(token: bytes) -> str:
    """Spell bytes in GPT-2's printable alphabet: ``b" a"`` → ``"Ġa"``."""
    return "".join(map(_CHARACTERS.__getitem__, token))


def unspell(text: str) -> bytes:
    """The bytes that :func:`spell` wrote as ``text``; raises KeyError at a character outside the alphabet."""
    return bytes(map(_BYTES.__getitem__, text))


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or malformed one raises UserError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file: {error}.") from None


def read_vocab(path: Path, special_tokens: Iterable[str] = ()) -> dict[int, bytes]:
    """Read GPT-2's vocab.json ({spelling: id}); entries named in ``special_tokens`` stand for their own UTF-8 bytes.

    A spelling outside GPT-2's alphabet is taken for a special token too. Raises UserError for a malformed file or two
    tokens with one id.
    """
    spellings = read_json(path)
    specials = set(special_tokens)
    vocab: dict[int, bytes] = {}
    if not isinstance(spellings, dict):
        raise UserError(f"{path} is not a vocabulary: expected one JSON object of spelling: id.")
    for text, token_id in spellings.items():
        if not isinstance(token_id, int) or token_id < 0 or token_id in vocab:
            raise UserError(f"{path}: the id of {text!r}, {token_id!r}, is not a whole number used once.")
        is_special = text in specials or not _BYTES.keys() >= set(text)  # named by the caller, or plainly one
        try:
            vocab[token_id] = text.encode() if is_special else unspell(text)
        except UnicodeEncodeError:
            raise UserError(f"{path}: {text!r} has a lone surrogate, which no bytes stand for.") from None
    return vocab


def _spellings(vocab: dict[int, bytes], special_tokens: Iterable[str]) -> dict[str, int]:
    """{spelling: id} in the order of the ids, special tokens in plain text; UserError where two are spelled alike."""
    specials = {token.encode(): token for token in special_tokens}
    spellings: dict[str, int] = {}
    for token_id, token in sorted(vocab.items()):
        text = specials.get(token) or spell(token)
        if text in spellings:  # a special token such as "Ġ", or one of a single ASCII character
            raise UserError(
                f"Tokens {spellings[text]} and {token_id} are both {text!r} in GPT-2's spelling, so that no file can "
                "tell them apart; choose another special token."
            )
        spellings[text] = token_id
    return spellings


def write_vocab(path: Path, vocab: dict[int, bytes], special_tokens: Iterable[str] = ()) -> None:
    """Write GPT-2's vocab.json in the order of the ids, special tokens in plain text.

    Raises UserError where a special token and another token would be spelled alike.
    """
    spellings = _spellings(vocab, special_tokens)
    path.write_text(json.dumps(spellings, ensure_ascii=False, indent=0), encoding="utf-8")


def read_merges(path: Path) -> list[tuple[bytes, bytes]]:
    """Read GPT-2's merges.txt: two spellings a line, in the order they were learned; a ``#version`` line may lead."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as merges: {error}.") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        try:
            left, right = map(unspell, line.rstrip("\r").split(" "))
        except (KeyError, ValueError):
            raise UserError(f"{path}, line {number}: {line!r} is not two spellings with a space between.") from None
        merges.append((left, right))
    return merges


def write_merges(path: Path, merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write GPT-2's merges.txt, without a header."""
    path.write_text("".join(f"{spell(left)} {spell(right)}\n" for left, right in merges), encoding="utf-8")


def write_vocab_text(path: Path, vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write the vocabulary for human eyes: id, the token as Python writes it, and the two parts it was merged from."""
    parts = {left + right: (left, right) for left, right in merges}
    with path.open("w", encoding="utf-8") as file:
        for token_id, token in sorted(vocab.items()):
            left, right = parts.get(token, (b"", b""))
            origin = f"  = {_show(left)} + {_show(right)}" if left else ""
            file.write(f"{token_id:>6}  {_show(token)}{origin}\n")


def _show(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace"))


def tokenizer_json(
    vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]], special_tokens: Iterable[str], pattern: str
) -> dict[str, Any]:
    """The content of a Hugging Face tokenizer.json that encodes to the same ids."""
    ids = {token: token_id for token_id, token in vocab.items()}
    specials = list(special_tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre_tokenizer: dict[str, Any] = {**byte_level, "use_regex": True}
    if pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    # At one place Hugging Face takes the leftmost-longest added token, as we do.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[token.encode()],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in specials
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _spellings(vocab, specials),
            "merges": [[spell(left), spell(right)] for left, right in merges],
        },
    }
