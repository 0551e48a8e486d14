"""Byte-level BPE: text to token ids and back.

Sources: Sennrich et al. 2016 (BPE); Radford et al. 2019 (bytes, pretokens); CS336 assignment 1 (section 2.6).
"""

import heapq
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lm import formats
from lm.buffers import WINDOW
from lm.corpus import decode_blocks
from lm.encoder import Encoder
from lm.errors import UserError
from lm.kernels.walk import Specials, pack_specials
from lm.pretokens import GPT2_PATTERN, check_special_tokens, cut_safely, pretokenize, split_special

_MOST = 1 << 24  # ids, a hundred times as many as any vocabulary has: tables are as long as the largest
_CACHE_ENTRIES = 1 << 18  # pretokens remembered by the reference; at about 200 bytes each, 50 MB


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Little-endian uint16, or uint32 when ids go past 65,535."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer:
    """Encodes text with a vocabulary and its merges.

    ``vocab`` maps ids to bytes and holds all 256 single bytes; ``merges`` are pairs of byte strings in the order they
    were learned. Special tokens missing from the vocabulary are appended to it. Where special tokens overlap in a
    text, the longest at the leftmost place wins. Raises UserError where vocabulary, merges and specials do not fit.
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
        self.pattern = pattern
        check_special_tokens(self.special_tokens)
        ids = {token: token_id for token_id, token in self.vocab.items()}
        for special in self.special_tokens:
            if special.encode() not in ids:
                token_id = max(self.vocab, default=-1) + 1
                self.vocab[token_id] = special.encode()
                ids[special.encode()] = token_id
        if self.size > _MOST:
            raise UserError(f"The token id {self.size - 1} is past {_MOST - 1}, the largest; number tokens from 0 on.")
        self.special_ids = {special: ids[special.encode()] for special in self.special_tokens}
        self._ids = ids
        encoder = Encoder.make(ids, self.merges, token_dtype(self.size))
        self._encoder = encoder if pattern == GPT2_PATTERN else None
        if not encoder:
            parts = (part for left, right in self.merges for part in (left, right, left + right))
            for token in chain((bytes([byte]) for byte in range(256)), parts):
                if token not in ids:
                    raise UserError(
                        f"The vocabulary lacks the token {token!r}, which the bytes or the merges need; "
                        "vocabulary and merges are not of one tokenizer."
                    )
        self._specials: dict[tuple[str, ...], Specials] = {}
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_files(
        cls, vocab_path: str | Path, merges_path: str | Path, special_tokens: Sequence[str] | None = None
    ) -> "Tokenizer":
        """Read GPT-2's vocab.json and merges.txt."""
        vocab = formats.read_vocab(Path(vocab_path), special_tokens or ())
        return cls(vocab, formats.read_merges(Path(merges_path)), special_tokens)

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read a directory that :meth:`save` wrote, its special tokens and pattern included."""
        directory = Path(directory)
        path = directory / "tokenizer_config.json"
        about = formats.read_json(path)
        match about:
            case {"special_tokens": [*specials], "pattern": str(pattern)} if all(type(one) is str for one in specials):
                vocab = formats.read_vocab(directory / "vocab.json", specials)
                return cls(vocab, formats.read_merges(directory / "merges.txt"), specials, pattern)
            case _:
                raise UserError(f"{path} does not name special_tokens and pattern; save the tokenizer again.")

    def save(self, directory: str | Path) -> None:
        """Write vocab.json and merges.txt (GPT-2), tokenizer.json (Hugging Face), vocab.txt (for human eyes) and
        tokenizer_config.json (special tokens and pattern)."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        formats.write_vocab(directory / "vocab.json", self.vocab, self.special_tokens)
        formats.write_merges(directory / "merges.txt", self.merges)
        self.save_tokenizer_json(directory / "tokenizer.json")
        formats.write_vocab_text(directory / "vocab.txt", self.vocab, self.merges)
        about = {"special_tokens": self.special_tokens, "pattern": self.pattern}
        (directory / "tokenizer_config.json").write_text(json.dumps(about, ensure_ascii=False, indent=1), "utf-8")

    @classmethod
    def from_tiktoken(
        cls, path: str | Path, special_tokens: Mapping[str, int] | None = None, pattern: str = GPT2_PATTERN
    ) -> "Tokenizer":
        """Read tiktoken's file of ranks, which names neither its special tokens nor its pattern."""
        vocab, merges = formats.read_tiktoken(Path(path))
        for token, token_id in (special_tokens or {}).items():
            if vocab.setdefault(token_id, token.encode()) != token.encode():
                raise UserError(f"{path} has another token with the id {token_id} of the special token {token!r}.")
        return cls(vocab, merges, list(special_tokens or ()), pattern)

    @classmethod
    def from_tokenizer_json(cls, path: str | Path) -> "Tokenizer":
        """Read Hugging Face's tokenizer.json of a byte-level BPE, its special tokens and pattern included."""
        return cls(*formats.read_tokenizer_json(Path(path)))

    def save_tiktoken(self, path: str | Path) -> None:
        """Write tiktoken's file of ranks; raises UserError where the ids do not follow the merges, as it needs."""
        formats.write_tiktoken(Path(path), self.vocab, self.special_tokens, self.merges)

    def save_tokenizer_json(self, path: str | Path) -> None:
        """Write Hugging Face's tokenizer.json; raises UserError where two tokens would be spelled alike in it."""
        content = formats.tokenizer_json(self.vocab, self.merges, self.special_tokens, self.pattern)
        Path(path).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    @property
    def size(self) -> int:
        """One more than the greatest id: the rows that a model needs."""
        return max(self.vocab) + 1

    def encode(self, text: str, allowed_special: Literal["all"] | Collection[str] = "all") -> list[int]:
        """Token ids of ``text``. Special tokens outside ``allowed_special`` are plain text, as users' words should be.

        Lone surrogates, which have no UTF-8 bytes, encode as U+FFFD.
        """
        arrays = list(self.encode_blocks([_utf8(text)], allowed_special))
        return np.concatenate(arrays).tolist() if arrays else []

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Lazily yield the ids that :meth:`encode` gives for the joined strings, holding about 4,096 bytes of them."""
        for ids in self.encode_blocks(_utf8_blocks(iterable), window=1 << 12):
            yield from ids.tolist()

    def encode_blocks(
        self, blocks: Iterable[bytes], allowed_special: Literal["all"] | Collection[str] = "all", window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Lazily yield the ids of the UTF-8 text that ``blocks`` join to, an array (uint16, or uint32 for a vocabulary
        past 65,536) for about ``window`` bytes of it. Raises UserError where the text is not UTF-8."""
        allowed = self._allowed(allowed_special)
        if self._encoder:
            yield from self._encoder.encode(blocks, self._packed(tuple(allowed)), window)
            return
        for piece in cut_safely(decode_blocks(blocks, "the text"), allowed, self.pattern, window):
            yield np.array(self.encode_reference(piece, allowed), token_dtype(self.size))

    def encode_reference(self, text: str, special_tokens: Sequence[str]) -> list[int]:
        """The ids of ``text``, by ``regex`` and plain Python: what the kernels are held equal to, and the way for
        patterns and merges that they do not know."""
        ids: list[int] = []
        for piece, is_special in split_special(text, special_tokens):
            if is_special:
                ids.append(self.special_ids[piece])
            else:
                for pretoken in pretokenize(piece, self.pattern):
                    ids += self._cache.get(pretoken) or self._encode_pretoken(pretoken)
        return ids

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD unless ``errors`` says otherwise.

        Raises UserError for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ``ids``; raises UserError for an id outside the vocabulary."""
        try:
            return b"".join(map(self.vocab.__getitem__, ids))
        except KeyError as error:
            raise UserError(
                f"Token id {error.args[0]} is not in the vocabulary of {self.size:,}; "
                "the ids were made with another tokenizer."
            ) from None

    def _allowed(self, allowed_special: Literal["all"] | Collection[str]) -> list[str]:
        if allowed_special == "all":
            return self.special_tokens
        if unknown := [token for token in allowed_special if token not in self.special_ids]:
            raise UserError(f"{unknown[0]!r} is not a special token; this tokenizer has {self.special_tokens}.")
        return [token for token in self.special_tokens if token in allowed_special]

    def _packed(self, allowed: tuple[str, ...]) -> Specials:
        if allowed not in self._specials:
            self._specials[allowed] = pack_specials([(token.encode(), self.special_ids[token]) for token in allowed])
        return self._specials[allowed]

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Pair of ids → (rank, id of the merged token); of two equal merges the earlier counts."""
        ranks: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right) in enumerate(self.merges):
            ranks.setdefault((self._ids[left], self._ids[right]), (rank, self._ids[left + right]))
        return ranks

    def _encode_pretoken(self, pretoken: str) -> list[int]:
        data = _utf8(pretoken)
        ids = self._merge([self._ids[bytes([byte])] for byte in data])
        if len(data) <= 64:
            if len(self._cache) >= _CACHE_ENTRIES:
                self._cache.clear()
            self._cache[pretoken] = ids
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Apply the merges to ``ids``, always the earliest learned first, the leftmost first among equals.

        A heap over a linked list: near-linear, where rescanning after every merge would be quadratic.
        """
        ranks = self._ranks
        end = len(ids)
        following = list(range(1, end + 1))
        previous = list(range(-1, end - 1))
        queue = [(ranks[pair][0], i, pair) for i, pair in enumerate(zip(ids, ids[1:], strict=False)) if pair in ranks]
        heapq.heapify(queue)
        while queue:
            _, i, pair = heapq.heappop(queue)
            j = following[i]
            if j >= end or (ids[i], ids[j]) != pair:
                continue  # one of the two has been merged with another since
            ids[i] = ranks[pair][1]
            ids[j] = -1
            following[i] = after = following[j]
            if after < end:
                previous[after] = i
                pair = (ids[i], ids[after])
                if pair in ranks:
                    heapq.heappush(queue, (ranks[pair][0], i, pair))
            before = previous[i]
            if before >= 0:
                pair = (ids[before], ids[i])
                if pair in ranks:
                    heapq.heappush(queue, (ranks[pair][0], before, pair))
        return [token_id for token_id in ids if token_id >= 0]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _utf8_blocks(texts: Iterable[str]) -> Iterator[bytes]:
    """UTF-8 of the text that ``texts`` join to; a surrogate pair may be cut in two by them."""
    held = ""
    for text in texts:
        text = held + text
        held = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        yield _utf8(text[: len(text) - len(held)])
    if held:
        yield _utf8(held)
