"""Configuration of the text sources and of chunking. Imports no slow library: the command line loads it at startup."""

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT

_DEFAULT_TRAIN = ("demo:6000",)
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # part of the names of options, metrics and columns


@dataclass(frozen=True)
class MixSource(Config, section="data.mix"):
    """A source of ``data.mix``: a part of the training text that has a name and a weight."""

    paths: list[str] = field(default_factory=list)
    """Text of the source, in the forms of data.train."""
    weight: float | None = bounded_field(None, ge=0, lt=math.inf)
    """Share of the training sequences, relative to the other weights: 3 beside 1 is three quarters. 0: only measure the
    loss on its validation text. Default: the source's share of all tokens."""
    max_epochs: float | None = bounded_field(None, gt=0, lt=math.inf)
    """How often the training reads the source at most. Then the other sources get its share, in proportion to their
    weights. Default: no limit."""


@dataclass(frozen=True)
class DataConfig(Config, section="data"):
    """Location and format of the text."""

    train: list[str] = field(default_factory=lambda: [*_DEFAULT_TRAIN])
    """Training text: paths, globs or URLs (file, https, s3, memory), plain or compressed (.gz .bz2 .xz .zst).
    .jsonl, .json and .parquet have a document per row, .html one page, .warc and .wet the pages of a crawl. In other
    files the separator ends a document. demo:N generates N short stories. Empty with mix."""
    mix: dict[str, MixSource] = field(default_factory=dict)
    """Training text of several sources by name, in place of train: {stories: {paths: [a.txt], weight: 3}, …}. Batches
    follow the weights, and each source has a validation loss. See docs/mixtures.md."""
    valid: list[str] = field(default_factory=list)
    """Validation text, in the same forms. Empty (the default): use part of the training documents, see valid_fraction.
    """
    valid_fraction: float = bounded_field(0.05, ge=0, lt=1)
    """Fraction of the training documents to hold out for validation if valid is empty. A document's hash decides, so
    that more documents or another order do not change the choice. 0: no validation text."""
    valid_max_bytes: int = bounded_field(16 << 20, ge=0)
    """Upper limit for valid_fraction, in bytes of the sources as stored (default 16 MiB). The fraction is halved until
    it fits, so that a large corpus keeps its text for training. With mix, of each named source. 0: no limit."""
    separator: str = field(default=END_OF_TEXT, metadata={"min_length": 1})
    """Special token that ends each document."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) with the document's text. A row in which it is null is skipped."""
    invalid_utf8: Literal["error", "replace"] = "error"
    """Treatment of bytes that are not UTF-8. error: stop and report the position. replace: use U+FFFD and count them.
    """
    separator_in_document: Literal["error", "remove"] = "error"
    """Treatment of a jsonl or parquet document that contains the separator. error: stop and report the row. remove:
    delete the separator and count it."""
    special_tokens_in_document: Literal["text", "token"] = "text"
    """Treatment of the text of another special token in a jsonl or parquet document. text: ordinary text. token: the
    special token, as in plain text."""
    page_text: Literal["main", "whole"] = "main"
    """Text of an HTML page. main: without navigation, advertisements and the like. whole: all of it."""

    def __post_init__(self) -> None:
        if self.mix:
            self._check_mix()
        elif not self.train:
            raise UserError("data.train is empty; name at least one file, glob or URL.")
        if not self.separator:
            raise UserError("data.separator is empty; name the token that ends a document, such as <|endoftext|>.")
        super().__post_init__()

    def _check_mix(self) -> None:
        """Raise UserError if ``mix`` is not valid. Empty ``train``, which has only its default."""
        if self.train and tuple(self.train) != _DEFAULT_TRAIN:
            raise UserError(
                "data.train and data.mix are both set. Leave one of them out, or empty it: --data.train '[]' or "
                "--data.mix '{}'."
            )
        for name, source in self.mix.items():
            if not isinstance(source, MixSource):
                raise UserError(
                    f"data.mix.{name} is {source!r}; it must have paths, and may have weight and max_epochs."
                )
            if not _SOURCE_NAME.fullmatch(name):
                raise UserError(
                    f"data.mix has a source named {name!r}; a name has at most 40 letters, digits, - and _, and begins "
                    "with a letter or digit."
                )
            if not source.paths:
                raise UserError(f"data.mix.{name} has no paths; name at least one file, glob or URL.")
        if all(source.weight == 0 for source in self.mix.values()):
            raise UserError("All weights of data.mix are 0; give at least one source a weight above 0.")
        object.__setattr__(self, "train", [])

    @property
    def named_sources(self) -> dict[str, MixSource]:
        """The sources of ``mix`` by name, in the order of the names: a database may not keep that of a mapping."""
        return dict(sorted(self.mix.items()))

    @property
    def mix_weights(self) -> dict[str, dict[str, float | None]]:
        """The weight and the limit of epochs of each source of ``mix``: what a training takes besides the text."""

        def number(value: float | None) -> float | None:
            return None if value is None else float(value)  # 3 and 3.0 are one key

        return {
            name: {"weight": number(source.weight), "max_epochs": number(source.max_epochs)}
            for name, source in self.named_sources.items()
        }

    @property
    def paths(self) -> list[str]:
        """Paths, globs and URLs of all text."""
        return [*self.train, *(path for source in self.mix.values() for path in source.paths), *self.valid]

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. Sources enter it by their content, the fraction and special tokens by their
        effect, and the text of pages only if there are pages."""
        others = (
            *("train", "mix", "valid", "valid_fraction", "valid_max_bytes"),
            *("special_tokens_in_document", "page_text"),
        )
        return {name: value for name, value in asdict(self).items() if name not in others}


@dataclass(frozen=True)
class ChunkConfig(Config, section="chunk"):
    """Size of the chunks, the units of parallel work."""

    target_bytes: int = bounded_field(16 << 20, ge=1)
    """Target size of a chunk in bytes (default 16 MiB). A chunk ends at the first special token past it. With
    the pattern gpt2 or jieba, a longer document is cut before white space at twice the size; with others never."""
