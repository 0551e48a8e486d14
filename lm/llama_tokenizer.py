"""What Llama's interface needs of a tokenizer, from SentencePiece's files and from ours.

Sources: Kudo and Richardson 2018 (SentencePiece); Touvron et al. 2023 (Llama 2) and Meta's code of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lm.completion import TextStream
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer

# The tokens that begin and end a text, by the name: GPT-2's and ours, Llama 2's, Llama 3's.
_ENDS = ((END_OF_TEXT, END_OF_TEXT), ("<s>", "</s>"), ("<|begin_of_text|>", "<|end_of_text|>"))
_SPACE = "▁"  # SentencePiece's


@dataclass(frozen=True)
class LlamaTokenizer:
    """What is needed of a tokenizer, whosever it is."""

    n_words: int
    """The rows that a model needs."""
    bos_id: int
    eos_id: int
    pad_id: int
    """-1 where there is none. Nothing here pads."""
    words: Callable[[str], list[int]]
    """Ids of plain text."""
    token_bytes: Mapping[int, bytes]
    """What each id adds to a text; special tokens nothing."""
    spaced: frozenset[int] = frozenset()
    """Ids whose first byte, a space, falls away where they begin a text."""

    @classmethod
    def load(cls, path: Path) -> "LlamaTokenizer":
        """Read SentencePiece's ``tokenizer.model``, a ``tokenizer.json``, or a directory with one, such as ours; of
        both the former.

        Raises UserError where it cannot be read, the ``sentencepiece`` library is missing, or no tokens are known to
        begin and end a text.
        """
        if path.is_dir():
            sentencepiece = path / "tokenizer.model"
            path = sentencepiece if sentencepiece.exists() else path / "tokenizer.json"
        if path.suffix == ".json":
            return cls._of_ours(path)
        return cls._of_sentencepiece(path)

    @classmethod
    def _of_ours(cls, path: Path) -> "LlamaTokenizer":
        tokenizer = Tokenizer.from_tokenizer_json(path)
        specials = tokenizer.special_ids
        ends = next(((specials[bos], specials[eos]) for bos, eos in _ENDS if {bos, eos} <= specials.keys()), None)
        if ends is None:
            raise UserError(
                f"{path} has none of the special tokens that begin and end a text "
                f"({', '.join(' and '.join(dict.fromkeys(pair)) for pair in _ENDS)}); add them and train with them."
            )
        silent = dict.fromkeys(specials.values(), b"")
        return cls(
            tokenizer.size, *ends, -1, lambda text: tokenizer.encode(text, allowed_special=()), tokenizer.vocab | silent
        )

    @classmethod
    def _of_sentencepiece(cls, path: Path) -> "LlamaTokenizer":
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise UserError(f"{path} needs the sentencepiece library: pip install 'textmill[llama]'") from None
        try:
            model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, ValueError) as error:  # the last for words of its own that are not UTF-8
            raise UserError(f"{path} cannot be read: {error}. It must be a model of SentencePiece.") from None
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

        def words(text: str) -> list[int]:
            # Half a surrogate pair has no UTF-8, which SentencePiece asks for: it becomes U+FFFD, as in our tokenizer.
            found: list[int] = model.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            return found

        ids = range(model.vocab_size())
        try:
            spaced = frozenset(token_id for token_id in ids if model.id_to_piece(token_id).startswith(_SPACE))
            token_bytes = {token_id: piece_bytes(token_id) for token_id in ids}
        except ValueError as error:  # a piece is not UTF-8, or not the byte that it is said to be
            raise UserError(f"{path} is damaged: {error}.") from None
        return cls(len(ids), model.bos_id(), model.eos_id(), model.pad_id(), words, token_bytes, spaced)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        """The ids of a user's words, in which special tokens are plain text, and of the ends that are asked for."""
        return [self.bos_id] * bos + self.words(text) + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return "".join(self.pieces(ids))

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """What :meth:`decode` gives, as the ids come: whole characters."""
        text, has_begun = TextStream(self.token_bytes), False
        for token_id in ids:
            piece = text.add(token_id)
            yield piece[1:] if token_id in self.spaced and not has_begun else piece
            has_begun = has_begun or self.token_bytes[token_id] != b""
        yield text.finish()
