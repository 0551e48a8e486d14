"""The interface of tokenizers for generation, whatever their algorithm, and the BOS and EOS tokens of a tokenizer."""

from collections.abc import Iterable
from typing import Protocol

from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import LLAMA3_BEGIN, Tokenizer

BEGIN_AND_END = (
    (END_OF_TEXT, END_OF_TEXT),  # this project's and GPT-2's
    ("<s>", "</s>"),  # Llama 2's
    (LLAMA3_BEGIN, "<|end_of_text|>"),  # Llama 3's
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),  # DeepSeek's
)


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
        """The ids of special tokens, which are no text."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a generation."""

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


def find_text_ends(tokenizer: TextTokenizer) -> tuple[str | None, str | None]:
    """Return the special tokens that begin and end a text, each None if it is not known.

    A tokenizer with a ``begin_token`` has the end that belongs to it, or else the end-of-text token.
    """
    begin, specials = tokenizer.begin_token, tokenizer.special_ids
    pairs = [pair for pair in BEGIN_AND_END if {*pair} <= specials.keys() and begin in (None, pair[0])]
    if pairs:
        return pairs[0]
    return begin, END_OF_TEXT if END_OF_TEXT in specials else None
