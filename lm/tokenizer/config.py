"""Config of BPE training. Imports neither numba nor pyarrow, so that the command line starts fast."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError
from lm.text.patterns import resolve_pattern, segment_pattern
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN, JIEBA, check_special_tokens, compile_pattern
from lm.tokenizer.formats.oniguruma import to_oniguruma
from lm.tokenizer.formats.vocab_merges import GPT2_ALPHABET

MAX_SIZE = 1 << 24  # of a vocabulary


@dataclass(frozen=True)
class TokenizerConfig(Config, section="tokenizer"):
    """Config of BPE training."""

    vocab_size: int = bounded_field(10_000, ge=256, le=MAX_SIZE)
    """Number of token ids: 256 bytes, the special tokens and the merges."""
    special_tokens: list[str] = field(default_factory=lambda: [END_OF_TEXT])
    """Texts encoded as one token each and never part of a pretoken. Must include the separator of the documents."""
    pattern: str = GPT2_PATTERN
    """Regular expression (``regex`` module) whose matches are the pretokens, or the name of a well-known one: gpt2,
    cl100k (GPT-4), o200k (GPT-4o, gpt-oss), llama3, qwen2, deepseek. These have compiled scanners; others are some
    fifty times slower. jieba: GPT-2's, and Chinese is divided into words by the library jieba. Default: GPT-2's.
    """
    min_frequency: int = bounded_field(1, ge=1)
    """Minimum number of occurrences of a merged pair. May end training before ``vocab_size`` on a small text."""

    min_count: int = bounded_field(1, ge=1)
    """Merges are learned from pretokens that occur at least this often. 1: from all. 2 saves most of the memory that
    the training of a large text needs, and changes few merges; the pages of count and merge show what is left out."""

    superwords: int = bounded_field(0, ge=0)
    """Number of the last merges that may cross words, so that frequent phrases become one token (SuperBPE); 0 turns it
    off. Needs the pattern gpt2, cl100k, llama3 or qwen2. More text fits a context, and serving takes fewer steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_special_tokens(self.special_tokens)
        check_vocab_size(self.vocab_size, self.special_tokens)
        for token in self.special_tokens:
            if len(token) == 1 and (token.isascii() or token in GPT2_ALPHABET):
                raise UserError(
                    f"The special token {token!r} is one byte, or stands for one in GPT-2's format; use a longer one. "
                    "For a text of one document a line, write the lines as JSON Lines (.jsonl)."
                )
        object.__setattr__(self, "pattern", resolve_pattern(self.pattern))
        compile_pattern(self.pattern)
        if self.superwords:
            segment_pattern(self.pattern)
            if self.superwords > (most := self.vocab_size - 256 - len(self.special_tokens)):
                raise UserError(
                    f"tokenizer.superwords {self.superwords} is too large: a vocab_size of {self.vocab_size} leaves "
                    f"{most} merges. Lower it, or raise tokenizer.vocab_size."
                )
        if self.pattern != JIEBA:
            to_oniguruma(self.pattern)  # else the tokenizer that is learned could not be saved

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the output of a stage, without ``superwords`` at its default: older keys stay."""
        return {name: value for name, value in asdict(self).items() if name != "superwords" or value}

    @property
    def document_pattern(self) -> str:
        """The pattern by which text is encoded: that of the segments if there are superwords."""
        return segment_pattern(self.pattern) if self.superwords else self.pattern


def check_vocab_size(vocab_size: int, special_tokens: Sequence[str]) -> None:
    """Raise UserError if ``vocab_size`` is too small for the bytes and the special tokens, or too large."""
    if vocab_size > MAX_SIZE:
        raise UserError(f"vocab_size {vocab_size} is too large; it may be {MAX_SIZE:,} at most.")
    min_size = 256 + len(special_tokens)
    if vocab_size < min_size:
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens need {min_size}."
        )
