"""SentencePiece's tokenizers, such as those of Llama 1 and 2, and Gemma's.

Source: Kudo and Richardson 2018 (SentencePiece).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.text.utf8 import replace_surrogates
from lm.tokenizer.piece_encoder import PieceEncoder
from lm.tokenizer.sentencepiece_model import (
    BYTE,
    CONTROL,
    SPACE,
    UNKNOWN,
    Piece,
    SentencePieceModel,
    read_sentencepiece,
)


class SentencePieceTokenizer:
    """The tokenizer of a ``tokenizer.model``, BPE or unigram, with the ids that begin and end a text.

    ``model`` is what the file ``path`` holds, if it is in another format.
    Raises UserError if the file cannot be read, if the model has no tokens that begin and end a text, and if it
    normalizes text by a map, which the ``sentencepiece`` library does, and the library is missing.
    """

    def __init__(self, path: Path, model: SentencePieceModel | None = None) -> None:
        self._model = model = read_sentencepiece(path) if model is None else model
        self._library = _load_library(path) if model.has_character_map else None
        self.special_ids = {piece.text: i for i, piece in enumerate(model.pieces) if piece.type == CONTROL}
        if not {model.begin, model.end} <= self.special_ids.keys():
            raise UserError(f"{path} has no tokens that begin and end a text; train it with bos and eos ids.")
        self.bos_id, self.eos_id = self.special_ids[model.begin], self.special_ids[model.end]
        self.size = len(model.pieces)
        self.vocab = {token_id: self._piece_bytes(piece) for token_id, piece in enumerate(model.pieces)}
        self.stop_ids = frozenset(self.special_ids.values())
        self.begin_token = model.begin
        self.space_ids = frozenset(i for i, piece in enumerate(model.pieces) if piece.text.startswith(SPACE))
        self._encoder = PieceEncoder(model)

    def _piece_bytes(self, piece: Piece) -> bytes:
        """Return the bytes that a piece adds to a text: none for special tokens."""
        if piece.type == CONTROL:
            return b""
        if piece.type == BYTE:
            return bytes([int(piece.text[1:-1], 16)])  # <0x0A>
        return (self._model.unknown_text if piece.type == UNKNOWN else piece.text.replace(SPACE, " ")).encode()

    def encode(self, text: str, allowed_special: tuple[()] = ()) -> list[int]:
        """Return the ids of ``text``, whose special tokens are plain text."""
        text = replace_surrogates(text)  # which no piece holds
        return self._encoder.encode(self._library.normalize(text) if self._library else self._model.normalize(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, with the space of the first piece. Bytes that are not UTF-8 become U+FFFD."""
        try:
            return b"".join(map(self.vocab.__getitem__, ids)).decode("utf-8", "replace")
        except KeyError as error:
            raise UserError(f"The vocabulary has no token with the id {error.args[0]}.") from None


def _load_library(path: Path) -> Any:
    """Return the library's tokenizer of a file."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise UserError(f"{path} needs the sentencepiece library: pip install 'textmill[llama]'") from None
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: pieces that are not UTF-8
        raise UserError(f"{path} cannot be read: {error}. It must be a SentencePiece model.") from None
