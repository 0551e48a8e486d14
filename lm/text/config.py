"""Configuration of the text sources and of chunking. Imports no slow library: the command line loads it at startup."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT


@dataclass(frozen=True)
class DataConfig(Config, section="data"):
    """Location and format of the text."""

    train: list[str] = field(default_factory=lambda: ["demo:6000"], metadata={"min_length": 1})
    """Training text: a list of paths, globs or URLs (file, https, s3, memory), plain or compressed (.gz .bz2 .xz .zst).
    .jsonl, .json and .parquet hold one document per row. .html is a page, and .warc and .wet hold pages of a crawl. In
    any other file, the separator ends each document. demo:N generates N short stories."""
    valid: list[str] = field(default_factory=list)
    """Validation text, in the same forms. Empty (the default): use part of the training documents, see valid_fraction.
    """
    valid_fraction: float = bounded_field(0.05, ge=0, lt=1)
    """Fraction of the training documents to hold out for validation if valid is empty. A document's hash decides, so
    that more documents or another order do not change the choice. 0: no validation text."""
    valid_max_bytes: int = bounded_field(16 << 20, ge=0)
    """Upper limit for valid_fraction, in bytes of the sources as stored (default 16 MiB). The fraction is halved until
    it fits, so that a large corpus keeps its text for training. 0: no limit."""
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
        if not self.train:
            raise UserError("data.train is empty; name at least one file, glob or URL.")
        if not self.separator:
            raise UserError("data.separator is empty; name the token that ends a document, such as <|endoftext|>.")
        super().__post_init__()

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. Sources enter it by their content, the fraction and special tokens by their
        effect, and the text of pages only if there are pages."""
        others = ("train", "valid", "valid_fraction", "valid_max_bytes", "special_tokens_in_document", "page_text")
        return {name: value for name, value in asdict(self).items() if name not in others}


@dataclass(frozen=True)
class ChunkConfig(Config, section="chunk"):
    """Size of the chunks, the units of parallel work."""

    target_bytes: int = bounded_field(16 << 20, ge=1)
    """Target size of a chunk in bytes (default 16 MiB). A chunk ends at the first special token past it. With
    the pattern gpt2 or jieba, a longer document is cut before white space at twice the size; with others never."""
