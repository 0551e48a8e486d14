"""The tokenizer of Llama's interface, read from SentencePiece's files or from this project's.

Source: Touvron et al. 2023 (Llama 2) and Meta's code for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lm.checkpoint.external import load_any_tokenizer
from lm.common.errors import UserError
from lm.inference.completion import TextStream
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.text_ends import BEGIN_AND_END, find_text_ends


@dataclass(frozen=True)
class LlamaTokenizer:
    """A tokenizer of any kind, with the ids that begin and end a text."""

    n_words: int
    """Number of ids, the rows that a model needs."""
    bos_id: int
    eos_id: int
    encode_text: Callable[[str], list[int]]
    """Returns the ids of plain text."""
    token_bytes: Mapping[int, bytes]
    """The bytes that each id adds to a text; empty for special tokens."""
    space_ids: frozenset[int] = frozenset()
    """Ids that begin with a space, which is dropped at the start of a text."""

    @classmethod
    def load(cls, path: Path) -> "LlamaTokenizer":
        """Read a ``tokenizer.model`` of SentencePiece, a ``tokenizer.json``, or a directory with one of them.

        Raises UserError if it cannot be read, if the ``sentencepiece`` library is missing, or if no tokens that begin
        and end a text are known.
        """
        tokenizer = load_any_tokenizer(path)
        if isinstance(tokenizer, SentencePieceTokenizer):
            ids = tokenizer.size, tokenizer.bos_id, tokenizer.eos_id
            return cls(*ids, tokenizer.encode, tokenizer.vocab, tokenizer.space_ids)
        special_ids = tokenizer.special_ids
        begin, end = find_text_ends(tokenizer)
        if not begin or not end:
            raise UserError(
                f"{path} has none of the special tokens that begin and end a text "
                f"({', '.join(' and '.join(dict.fromkeys(pair)) for pair in BEGIN_AND_END)}); add them and train with "
                "them."
            )
        ids = tokenizer.size, special_ids[begin], special_ids[end]
        token_bytes = tokenizer.vocab | dict.fromkeys(special_ids.values(), b"")
        return cls(*ids, lambda text: tokenizer.encode(text, allowed_special=()), token_bytes)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        """Return the ids of ``text``, whose special tokens are plain text, with the begin and end ids if asked for."""
        return [self.bos_id] * bos + self.encode_text(text) + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return "".join(self.decode_stream(ids))

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of :meth:`decode` piece by piece, in whole characters."""
        text, has_begun = TextStream(self.token_bytes), False
        for token_id in ids:
            piece = text.add(token_id)
            yield piece[1:] if token_id in self.space_ids and not has_begun else piece
            has_begun = has_begun or self.token_bytes.get(token_id, b"") != b""
        yield text.finish()
