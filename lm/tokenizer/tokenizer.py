"""Byte-level BPE tokenizer: text to token ids and back.

Sources: Sennrich et al. 2016 (BPE); Radford et al. 2019 (bytes, pretokens); CS336 assignment 1 (section 2.6).
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.common.json_files import read_json
from lm.kernels.bpe.pretokens import Specials, pack_specials
from lm.text.patterns import resolve_pattern
from lm.text.pretokenize import GPT2_PATTERN, check_special_tokens, split_at_safe_cuts
from lm.text.scanners import has_compiled_scanner
from lm.text.utf8 import decode_utf8_blocks, encode_utf8, encode_utf8_blocks
from lm.text.windows import WINDOW
from lm.tokenizer.fast_encoder import FastEncoder
from lm.tokenizer.formats import gpt2, hugging_face, tiktoken, vocab_text
from lm.tokenizer.reference import ReferenceEncoder

_MAX_SIZE = 1 << 24  # bounds the memory of tables indexed by token id


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype of token files: little-endian uint16, or uint32 if ids exceed 65,535."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer:
    """Encodes text with a vocabulary and its merges.

    ``vocab`` maps ids to bytes and holds all 256 single bytes. ``merges`` are pairs of byte strings in the order in
    which they were learned. Special tokens missing from the vocabulary are appended to it. If special tokens overlap
    in a text, the leftmost is encoded, and of several at one position the longest. ``pattern`` is a regular expression
    or a name in :data:`lm.text.patterns.PATTERNS` or :data:`lm.text.patterns.REGEX_PATTERNS`.

    Raises UserError if the vocabulary lacks a token of the merges, an id is too large, or a special token is invalid.
    """

    def __init__(
        self,
        vocab: dict[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = None,
        pattern: str = GPT2_PATTERN,
    ) -> None:
        self.vocab = dict(vocab)
        self.merges = list(merges)
        self.special_tokens = list(special_tokens or ())
        self.pattern = pattern = resolve_pattern(pattern)
        check_special_tokens(self.special_tokens)
        ids = {token: token_id for token_id, token in self.vocab.items()}
        for special in self.special_tokens:
            if special.encode() not in ids:
                token_id = max(self.vocab, default=-1) + 1
                self.vocab[token_id] = special.encode()
                ids[special.encode()] = token_id
        if self.size > _MAX_SIZE:
            raise UserError(f"The token id {self.size - 1} exceeds the limit of {_MAX_SIZE - 1}; number tokens from 0.")
        self.special_ids = {special: ids[special.encode()] for special in self.special_tokens}
        self._ids = ids
        self._fast_encoder: FastEncoder | None = None
        if has_compiled_scanner(pattern):
            self._fast_encoder = FastEncoder.from_merges(ids, self.merges, token_dtype(self.size), pattern)
        if not self._fast_encoder:
            try:
                self._reference_encoder  # noqa: B018
            except KeyError as error:
                raise UserError(
                    f"The vocabulary lacks the token {error.args[0]!r}, which the bytes or the merges need; "
                    "use the vocabulary and the merges of the same tokenizer."
                ) from None
        self._packed_special_tokens: dict[tuple[str, ...], Specials] = {}

    @classmethod
    def from_files(
        cls, vocab_path: str | Path, merges_path: str | Path, special_tokens: Sequence[str] | None = None
    ) -> "Tokenizer":
        """Read GPT-2's vocab.json and merges.txt."""
        vocab = gpt2.read_vocab(Path(vocab_path), special_tokens or ())
        return cls(vocab, gpt2.read_merges(Path(merges_path)), special_tokens)

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read a directory written by :meth:`save`, with special tokens and pattern."""
        directory = Path(directory)
        path = directory / "tokenizer_config.json"
        match read_json(path):
            case {"special_tokens": [*specials], "pattern": str(pattern)} if all(type(s) is str for s in specials):
                vocab = gpt2.read_vocab(directory / "vocab.json", specials)
                return cls(vocab, gpt2.read_merges(directory / "merges.txt"), specials, pattern)
        raise UserError(f"{path} does not name special_tokens and pattern; save the tokenizer again.")

    def save(self, directory: str | Path) -> None:
        """Write vocab.json and merges.txt (GPT-2), tokenizer.json (Hugging Face), vocab.txt (readable) and
        tokenizer_config.json (special tokens and pattern)."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        gpt2.write_vocab(directory / "vocab.json", self.vocab, self.special_tokens)
        gpt2.write_merges(directory / "merges.txt", self.merges)
        self.save_tokenizer_json(directory / "tokenizer.json")
        vocab_text.write_vocab_text(directory / "vocab.txt", self.vocab, self.merges)
        config = {"special_tokens": self.special_tokens, "pattern": self.pattern}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), "utf-8")

    @classmethod
    def from_tiktoken(
        cls, path: str | Path, special_tokens: Mapping[str, int] | None = None, pattern: str = GPT2_PATTERN
    ) -> "Tokenizer":
        """Read tiktoken's rank file. The file holds neither the special tokens (text to id) nor the pattern."""
        vocab, merges = tiktoken.read_tiktoken(Path(path))
        for token, token_id in (special_tokens or {}).items():
            if vocab.setdefault(token_id, token.encode()) != token.encode():
                raise UserError(f"{path} has another token with the id {token_id} of the special token {token!r}.")
        return cls(vocab, merges, list(special_tokens or ()), pattern)

    @classmethod
    def from_tokenizer_json(cls, path: str | Path) -> "Tokenizer":
        """Read Hugging Face's tokenizer.json of a byte-level BPE, with special tokens and pattern."""
        return cls(*hugging_face.read_tokenizer_json(Path(path)))

    def save_tiktoken(self, path: str | Path) -> None:
        """Write tiktoken's rank file. Raises UserError if the ids are not in the order of the merges."""
        tiktoken.write_tiktoken(Path(path), self.vocab, self.special_tokens, self.merges)

    def save_tokenizer_json(self, path: str | Path) -> None:
        """Write Hugging Face's tokenizer.json. Raises UserError if two tokens have the same text in it."""
        content = hugging_face.make_tokenizer_json(self.vocab, self.merges, self.special_tokens, self.pattern)
        Path(path).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    @property
    def size(self) -> int:
        """The largest token id plus one: the number of rows of an embedding table."""
        return max(self.vocab) + 1

    def encode(self, text: str, allowed_special: Literal["all"] | Collection[str] = "all") -> list[int]:
        """Return the token ids of ``text``. Special tokens outside ``allowed_special`` are encoded as plain text.

        Lone surrogates, which have no UTF-8 bytes, are encoded as U+FFFD.
        """
        arrays = list(self.encode_blocks([encode_utf8(text)], allowed_special))
        return np.concatenate(arrays).tolist() if arrays else []

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Lazily yield the token ids of the concatenated strings, with about 4,096 bytes of text in memory."""
        for ids in self.encode_blocks(encode_utf8_blocks(iterable), window=1 << 12):
            yield from ids.tolist()

    def encode_blocks(
        self, blocks: Iterable[bytes], allowed_special: Literal["all"] | Collection[str] = "all", window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Lazily yield the token ids of the concatenated ``blocks`` of UTF-8 text.

        Each array holds the ids of about ``window`` bytes; its dtype is :func:`token_dtype`. Raises UserError if the
        text is not UTF-8.
        """
        allowed = self._select_special_tokens(allowed_special)
        if self._fast_encoder:
            if (key := tuple(allowed)) not in self._packed_special_tokens:
                packed = pack_specials([(token.encode(), self.special_ids[token]) for token in allowed])
                self._packed_special_tokens[key] = packed
            yield from self._fast_encoder.encode(blocks, self._packed_special_tokens[key], window)
            return
        for piece in split_at_safe_cuts(decode_utf8_blocks(blocks, "the text"), allowed, self.pattern, window):
            yield np.array(self.encode_reference(piece, allowed), token_dtype(self.size))

    def encode_reference(self, text: str, special_tokens: Sequence[str]) -> list[int]:
        """Return the token ids of ``text`` by plain Python; see :mod:`lm.tokenizer.reference`."""
        return self._reference_encoder.encode(text, special_tokens)

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """Return the text of ``ids``. ``errors`` is the error handler of :meth:`bytes.decode` for invalid UTF-8.

        Raises UserError for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ``ids``. Raises UserError for an id outside the vocabulary."""
        try:
            return b"".join(map(self.vocab.__getitem__, ids))
        except KeyError as error:
            raise UserError(
                f"Token id {error.args[0]} is not in the vocabulary of {self.size:,}; "
                "decode with the tokenizer that encoded the text."
            ) from None

    def _select_special_tokens(self, allowed_special: Literal["all"] | Collection[str]) -> list[str]:
        if allowed_special == "all":
            return self.special_tokens
        if unknown := [token for token in allowed_special if token not in self.special_ids]:
            raise UserError(f"{unknown[0]!r} is not a special token; this tokenizer has {self.special_tokens}.")
        return [token for token in self.special_tokens if token in allowed_special]

    @cached_property
    def _reference_encoder(self) -> ReferenceEncoder:
        return ReferenceEncoder(self._ids, self.merges, self.pattern)
