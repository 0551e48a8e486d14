"""The interface of tokenizers for generation, whatever their algorithm."""

from collections.abc import Iterable
from typing import Protocol

from lm.common.errors import UserError
from lm.tokenizer.tokenizer import Tokenizer


class TextTokenizer(Protocol):
    """Encodes prompts and decodes generated ids: a :class:`lm.tokenizer.tokenizer.Tokenizer`, or a
    :class:`lm.tokenizer.sentencepiece.SentencePieceTokenizer`."""

    @property
    def size(self) -> int:
        """Number of ids, the rows that a model needs."""

    @property
    def vocab(self) -> dict[int, bytes]:
        """The bytes of each id."""

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens, each of which ends a generation."""

    @property
    def begin_token(self) -> str | None:
        """The special token that the model has seen before each text, if there is one."""

    def encode(self, text: str, allowed_special: tuple[()]) -> list[int]:
        """Return the ids of ``text``, whose special tokens are plain text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``."""


def require_byte_level(tokenizer: TextTokenizer, name: str) -> Tokenizer:
    """Return ``tokenizer``. Raises UserError, with the ``name`` of the model, if it is not a byte-level BPE."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    raise UserError(
        f"{name} has a SentencePiece tokenizer, with which textmill can only generate; use a model that has a "
        "byte-level BPE in a tokenizer.json."
    )
