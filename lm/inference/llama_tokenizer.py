"""The tokenizer of Llama's interface, read from SentencePiece's files or from this project's.

Sources: Kudo and Richardson 2018 (SentencePiece); Touvron et al. 2023 (Llama 2) and Meta's code for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lm.common.errors import UserError
from lm.inference.completion import TextStream
from lm.text.pretokenize import END_OF_TEXT
from lm.text.utf8 import replace_surrogates
from lm.tokenizer.tokenizer import Tokenizer

# Names of the tokens that begin and end a text: this project's and GPT-2's, Llama 2's, Llama 3's.
_BOS_AND_EOS = ((END_OF_TEXT, END_OF_TEXT), ("<s>", "</s>"), ("<|begin_of_text|>", "<|end_of_text|>"))
_SPACE = "▁"  # in SentencePiece's pieces


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
        if path.is_dir():
            sentencepiece = path / "tokenizer.model"
            path = sentencepiece if sentencepiece.exists() else path / "tokenizer.json"
        return cls._load_json(path) if path.suffix == ".json" else cls._load_sentencepiece(path)

    @classmethod
    def _load_json(cls, path: Path) -> "LlamaTokenizer":
        tokenizer = Tokenizer.from_tokenizer_json(path)
        special_ids = tokenizer.special_ids
        pairs = [(special_ids[bos], special_ids[eos]) for bos, eos in _BOS_AND_EOS if {bos, eos} <= special_ids.keys()]
        if not pairs:
            raise UserError(
                f"{path} has none of the special tokens that begin and end a text "
                f"({', '.join(' and '.join(dict.fromkeys(pair)) for pair in _BOS_AND_EOS)}); add them and train with "
                "them."
            )
        token_bytes = tokenizer.vocab | dict.fromkeys(special_ids.values(), b"")
        return cls(tokenizer.size, *pairs[0], lambda text: tokenizer.encode(text, allowed_special=()), token_bytes)

    @classmethod
    def _load_sentencepiece(cls, path: Path) -> "LlamaTokenizer":
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise UserError(f"{path} needs the sentencepiece library: pip install 'textmill[llama]'") from None
        try:
            model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: pieces that are not UTF-8
            raise UserError(f"{path} cannot be read: {error}. It must be a SentencePiece model.") from None
        if min(model.bos_id(), model.eos_id()) < 0:
            raise UserError(f"{path} has no tokens that begin and end a text; train it with bos and eos ids.")

        def piece_bytes(token_id: int) -> bytes:
            if model.is_control(token_id):
                return b""
            piece: str = model.id_to_piece(token_id)
            if model.is_byte(token_id):
                return bytes([int(piece[1:-1], 16)])  # <0x0A>
            text: str = model.decode([token_id]) if model.is_unknown(token_id) else piece.replace(_SPACE, " ")
            return text.encode()

        def encode_text(text: str) -> list[int]:
            ids: list[int] = model.encode(replace_surrogates(text))  # SentencePiece requires valid UTF-8
            return ids

        all_ids = range(model.vocab_size())
        try:
            space_ids = frozenset(token_id for token_id in all_ids if model.id_to_piece(token_id).startswith(_SPACE))
            token_bytes = {token_id: piece_bytes(token_id) for token_id in all_ids}
        except ValueError as error:  # a piece is not UTF-8, or not a valid byte piece
            raise UserError(f"{path} is damaged: {error}.") from None
        return cls(len(all_ids), model.bos_id(), model.eos_id(), encode_text, token_bytes, space_ids)

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
            has_begun = has_begun or self.token_bytes[token_id] != b""
        yield text.finish()
