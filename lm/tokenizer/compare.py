"""Comparison of tokenizers on texts: compression, speed, use of the vocabulary, and split words."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from lm.common.errors import UserError
from lm.text.utf8 import replace_surrogates
from lm.tokenizer.text_tokenizer import TextTokenizer

_WORD = regex.compile(r"[\p{L}\p{M}]+")


class Encoding(NamedTuple):
    """A text in the tokens of a tokenizer."""

    tokens: int
    used: int
    """Different tokens that occur."""
    split_words: float | None
    """Share of the words (runs of letters) that are more than one token. None if the text has no words, or the tokens
    are not its bytes, because the tokenizer normalizes text."""
    seconds: float
    """The fastest of three encodings."""


@dataclass(frozen=True)
class ComparedTokenizer:
    """A tokenizer on all texts."""

    size: int
    """Number of ids."""
    encodings: dict[str, Encoding]
    """By name of the text."""
    used: int
    """Different tokens that occur in any of the texts."""
    longest: list[str]
    """The longest tokens with letters in the texts, by bytes, descending: without, they are lines of dashes."""


@dataclass(frozen=True)
class Comparison:
    """Tokenizers on the same texts."""

    texts: dict[str, tuple[int, int]]
    """Bytes and characters by name of the text."""
    tokenizers: dict[str, ComparedTokenizer]

    def bytes_per_token(self, text: str, tokenizer: str) -> float:
        """Return how well a tokenizer compresses a text."""
        return self.texts[text][0] / max(1, self.tokenizers[tokenizer].encodings[text].tokens)

    def megabytes_per_second(self, text: str, tokenizer: str) -> float:
        """Return how fast a tokenizer encodes a text."""
        return self.texts[text][0] / 1e6 / self.tokenizers[tokenizer].encodings[text].seconds

    def figures(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""

        def on_text(text: str, name: str) -> dict[str, Any]:
            return self.tokenizers[name].encodings[text]._asdict() | {
                "bytes_per_token": self.bytes_per_token(text, name),
                "megabytes_per_second": self.megabytes_per_second(text, name),
            }

        return {
            "texts": {text: {"bytes": size, "characters": length} for text, (size, length) in self.texts.items()},
            "tokenizers": {
                name: asdict(compared) | {"encodings": {text: on_text(text, name) for text in self.texts}}
                for name, compared in self.tokenizers.items()
            },
        }


def compare_tokenizers(tokenizers: Mapping[str, TextTokenizer], texts: Mapping[str, str]) -> Comparison:
    """Encode each text with each tokenizer; special tokens in them are plain text.

    Raises UserError if there is no tokenizer or no text, or if a text is empty.
    """
    if not tokenizers or not texts:
        raise UserError("A comparison needs at least one tokenizer and one text.")
    if empty := [name for name, text in texts.items() if not text]:
        raise UserError(f"The text {empty[0]} is empty; name a file with text.")
    words = {name: _Words(replace_surrogates(text)) for name, text in texts.items()}
    compared = {name: _compare(tokenizer, words) for name, tokenizer in tokenizers.items()}
    return Comparison({name: (text.num_bytes, len(text.text)) for name, text in words.items()}, compared)


class _Words:
    """A text and the places of its words."""

    def __init__(self, text: str) -> None:
        self.text = text
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (code_points > 0x7F) + (code_points > 0x7FF).astype(np.int64) + (code_points > 0xFFFF)
        byte_offsets = np.concatenate(([0], np.cumsum(widths)))
        self.num_bytes = int(byte_offsets[-1])
        spans = np.array([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)
        self.starts, self.ends = byte_offsets[spans[:, 0]], byte_offsets[spans[:, 1]]

    def split_share(self, token_lengths: npt.NDArray[np.int64]) -> float | None:
        """Return the share of words with a token's end inside, for tokens of these lengths in bytes."""
        token_ends = np.cumsum(token_lengths)
        if not len(self.starts) or token_lengths.sum() != self.num_bytes:
            return None
        ends_before = np.zeros(self.num_bytes + 2, np.int64)  # at i: token ends in [0, i)
        np.add.at(ends_before, token_ends + 1, 1)
        np.cumsum(ends_before, out=ends_before)
        return float(np.mean(ends_before[self.ends] > ends_before[self.starts + 1]))


def _compare(tokenizer: TextTokenizer, texts: Mapping[str, _Words]) -> ComparedTokenizer:
    lengths = np.zeros(tokenizer.size, np.int64)
    for token_id, token in tokenizer.vocab.items():
        lengths[token_id] = len(token)
    is_used = np.zeros(tokenizer.size, bool)
    encodings = {}
    for name, words in texts.items():
        tokenizer.encode(words.text[:10_000], ())  # warm-up
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            ids = tokenizer.encode(words.text, ())
            seconds.append(time.perf_counter() - start)
        array = np.array(ids, np.int64)
        used = np.unique(array)
        is_used[used] = True
        encodings[name] = Encoding(len(array), len(used), words.split_share(lengths[array]), min(seconds))
    used_ids = np.flatnonzero(is_used)
    by_length = used_ids[np.argsort(-lengths[used_ids], kind="stable")]
    tokens = (tokenizer.vocab[int(token_id)].decode("utf-8", "replace") for token_id in by_length)
    longest = list(islice(filter(_WORD.search, tokens), 8))
    return ComparedTokenizer(tokenizer.size, encodings, len(used_ids), longest)
