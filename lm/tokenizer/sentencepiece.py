"""SentencePiece's tokenizers, such as those of Llama 1 and 2.

Source: Kudo and Richardson 2018 (SentencePiece).
"""

from collections.abc import Iterable
from pathlib import Path

from lm.common.errors import UserError
from lm.text.utf8 import replace_surrogates

_SPACE = "▁"  # in SentencePiece's pieces


class SentencePieceTokenizer:
    """The tokenizer of a ``tokenizer.model``, with the ids that begin and end a text.

    Raises UserError if the file cannot be read, if the ``sentencepiece`` library is missing, or if the model has no
    tokens that begin and end a text.
    """

    def __init__(self, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise UserError(f"{path} needs the sentencepiece library: pip install 'textmill[llama]'") from None
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: pieces that are not UTF-8
            raise UserError(f"{path} cannot be read: {error}. It must be a SentencePiece model.") from None
        self.bos_id: int = self._model.bos_id()
        self.eos_id: int = self._model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise UserError(f"{path} has no tokens that begin and end a text; train it with bos and eos ids.")
        self.size: int = self._model.vocab_size()
        all_ids = range(self.size)
        try:
            pieces: list[str] = [self._model.id_to_piece(token_id) for token_id in all_ids]
            self.vocab = {token_id: self._piece_bytes(token_id, pieces[token_id]) for token_id in all_ids}
        except ValueError as error:  # a piece is not UTF-8, or not a valid byte piece
            raise UserError(f"{path} is damaged: {error}.") from None
        self.special_ids = {pieces[token_id]: token_id for token_id in all_ids if self._model.is_control(token_id)}
        self.stop_ids = frozenset(self.special_ids.values())
        self.begin_token = pieces[self.bos_id]
        self.space_ids = frozenset(token_id for token_id in all_ids if pieces[token_id].startswith(_SPACE))

    def _piece_bytes(self, token_id: int, piece: str) -> bytes:
        """Return the bytes that a piece adds to a text: none for special tokens."""
        if self._model.is_control(token_id):
            return b""
        if self._model.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        text: str = self._model.decode([token_id]) if self._model.is_unknown(token_id) else piece.replace(_SPACE, " ")
        return text.encode()

    def encode(self, text: str, allowed_special: tuple[()] = ()) -> list[int]:
        """Return the ids of ``text``, whose special tokens are plain text."""
        ids: list[int] = self._model.encode(replace_surrogates(text))  # SentencePiece requires valid UTF-8
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, with the space of the first piece. Bytes that are not UTF-8 become U+FFFD."""
        try:
            return b"".join(map(self.vocab.__getitem__, ids)).decode("utf-8", "replace")
        except KeyError as error:
            raise UserError(f"The vocabulary has no token with the id {error.args[0]}.") from None
