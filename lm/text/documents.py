"""Documents of plain text, JSON Lines, Parquet, HTML and WARC files, with their hashes and statistics."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lm.common.errors import UserError
from lm.files.compression import detect_format
from lm.files.json import parse_json
from lm.text.config import DataConfig
from lm.text.rows import open_parquet, read_lines
from lm.text.sources import open_decompressed
from lm.text.utf8 import decode_utf8_blocks, replace_surrogates
from lm.text.web_pages import WebPages, is_web_format, read_web_documents


@dataclass
class TextStatistics:
    """Number of documents, of invalid UTF-8 sequences replaced and of separators removed, and a length histogram.

    ``lengths[k]`` counts the documents of at least 2^(k/4) and fewer than 2^((k+1)/4) characters.
    """

    documents: int = 0
    replaced: int = 0
    separators_removed: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * 256)

    def add_document(self, length: int) -> None:
        """Count a document of ``length`` characters."""
        self.documents += 1
        self.lengths[int(4 * math.log2(max(1, length)))] += 1

    def add_replaced(self, count: int) -> None:
        """Count invalid UTF-8 sequences that were replaced."""
        self.replaced += count

    def __sub__(self, part: "TextStatistics") -> "TextStatistics":
        """Return the statistics without the documents of ``part``."""
        lengths = [whole - other for whole, other in zip(self.lengths, part.lengths, strict=True)]
        return replace(self, documents=self.documents - part.documents, lengths=lengths)

    def __add__(self, other: "TextStatistics") -> "TextStatistics":
        return TextStatistics(
            self.documents + other.documents,
            self.replaced + other.replaced,
            self.separators_removed + other.separators_removed,
            [sum(counts) for counts in zip(self.lengths, other.lengths, strict=True)],
        )


@dataclass
class DocumentHash:
    """SHA-256 and length in characters of a document without surrounding white space, from its pieces.

    Trailing white space must not count. So we keep the digest up to the last other character.
    """

    length: int = 0
    _characters_read: int = 0  # from the first non-blank character
    _running: Any = field(default_factory=hashlib.sha256)
    _digest: Any = field(default_factory=hashlib.sha256)  # up to the last non-blank character

    def update(self, piece: str) -> None:
        """Add the next piece of the document."""
        text = piece if self._characters_read else piece.lstrip()
        if words := text.rstrip():
            self._running.update(words.encode())
            self._digest = self._running.copy()
            self.length = self._characters_read + len(words)
        if space := text[len(words) :]:
            self._running.update(space.encode())
        self._characters_read += len(text)

    @property
    def value(self) -> int:
        """First 64 bits of the SHA-256."""
        return int.from_bytes(self._digest.digest()[:8], "big")


def stream_documents(
    url: str,
    config: DataConfig,
    statistics: TextStatistics,
    digest: "hashlib._Hash | None" = None,
    pages: WebPages | None = None,
) -> Iterator[str]:
    """Yield the documents of a source, each followed by ``config.separator``, as pieces of text.

    The separator occurs only at the end of a piece. A document of plain text may be larger than memory and is many
    pieces; of the other formats, a document is one piece. Plain text keeps every byte: white space after the last
    separator is a final piece without a separator. Any other text after it is a document, which gets a separator.

    Adds the documents to ``statistics``, and the stored bytes to ``digest``, except those of Parquet, which is not read
    in order, and what is known of web pages to ``pages``. Raises UserError if the source cannot be read.
    """
    file_format, _ = detect_format(url)
    if file_format == "text":
        yield from _stream_text(url, config, statistics, digest)
        return
    if file_format == "jsonl":
        rows = _jsonl_rows(url, config, statistics, digest)
    elif is_web_format(url):
        rows = read_web_documents(url, config.page_text, pages or WebPages(), digest)
    else:
        rows = _parquet_rows(url, config, statistics)
    for row_name, document in rows:
        if _first_separator(document, config.separator) < len(document):
            if config.separator_in_document == "error":
                raise UserError(
                    f"{url}, {row_name}: the document contains the separator {config.separator}. "
                    "Choose another separator, or set data.separator_in_document to remove."
                )
            document, removed = _remove_separators(document, config.separator)
            statistics.separators_removed += removed
            while (start := _first_separator(document, config.separator)) < len(document):
                statistics.separators_removed += 1
                document = document[:start]
        statistics.add_document(len(document))
        yield document + config.separator


def _first_separator(document: str, separator: str) -> int:
    """Return the index of the first separator in ``document + separator``. It may overlap the document's end."""
    return (document + separator).index(separator)


def _remove_separators(document: str, separator: str) -> tuple[str, int]:
    """Return a document without separators, and how many were removed. A removal may join two halves to another one.

    Each part between two separators joins the text before it. A separator there ends in the part's first bytes, so only
    these are looked at one by one.
    """
    pattern = separator.encode()
    text = bytearray()
    first, *parts = document.encode().split(pattern)
    text += first
    removed = len(parts)
    for part in parts:
        position, end = 0, len(pattern) - 1  # no separator ends at ``end`` or later
        while position < min(end, len(part)):
            text.append(part[position])
            position += 1
            if text.endswith(pattern):
                del text[-len(pattern) :]
                removed += 1
                end = position + len(pattern) - 1
        text += part[position:]
    return text.decode(), removed


def _stream_text(
    url: str, config: DataConfig, statistics: TextStatistics, digest: "hashlib._Hash | None"
) -> Iterator[str]:
    length = 0  # of the current document
    with open_decompressed(url, digest) as blocks:
        texts = decode_utf8_blocks(blocks, url, config.invalid_utf8, statistics.add_replaced)
        # Without the byte order mark that some programs on Windows write.
        unmarked = (text if number else text.removeprefix("\ufeff") for number, text in enumerate(texts))
        for piece in split_documents(unmarked, config.separator):
            length += len(piece)
            if piece.endswith(config.separator):
                statistics.add_document(length - len(config.separator))
                length = 0
            yield piece


def split_documents(texts: Iterable[str], separator: str) -> Iterator[str]:
    """Yield the concatenation of ``texts`` in pieces of documents, as :func:`stream_documents` does for plain text."""
    is_blank = True  # the current document, without ``tail``
    tail = ""  # the last characters; they may be the start of a separator
    for text in texts:
        *endings, rest = (tail + text).split(separator)
        for ending in endings:
            yield ending + separator
            is_blank = True
        cut = max(0, len(rest) - len(separator) + 1)
        piece, tail = rest[:cut], rest[cut:]
        if piece:
            is_blank = is_blank and piece.isspace()
            yield piece
    if tail and is_blank and tail.isspace():
        yield tail
    elif tail or not is_blank:
        yield tail + separator


def _jsonl_rows(
    url: str, config: DataConfig, statistics: TextStatistics, digest: "hashlib._Hash | None"
) -> Iterator[tuple[str, str]]:
    """Yield (name of the row for messages, document); null documents are skipped."""
    for row_name, offset, line in read_lines(url, digest):
        text = _decode_row(line or b"", url, config, statistics, offset)
        if not text.strip():
            continue
        try:
            row = parse_json(text)
        except ValueError as error:
            raise UserError(f"{url}, {row_name}: {error}. JSON Lines have one object a line.") from None
        document = row.get(config.text_field, 0) if isinstance(row, dict) else 0
        if not isinstance(document, str | None):
            raise UserError(f"{url}, {row_name}: no text field {config.text_field!r}; set data.text_field.")
        if document is not None:
            yield row_name, replace_surrogates(document)


def _decode_row(data: bytes, name: str, config: DataConfig, statistics: TextStatistics, offset: int = 0) -> str:
    try:
        return data.decode()  # faster
    except UnicodeDecodeError:
        return "".join(decode_utf8_blocks([data], name, config.invalid_utf8, statistics.add_replaced, offset))


def _parquet_rows(url: str, config: DataConfig, statistics: TextStatistics) -> Iterator[tuple[str, str]]:
    """Yield (name of the row for messages, document); null documents are skipped."""
    import pyarrow as pa  # slow to import

    field = config.text_field
    with open_parquet(url) as file:
        schema = file.schema_arrow
        if field not in schema.names:
            raise UserError(f"{url}: no column {field!r} among {schema.names}; set data.text_field.")
        if schema.names.count(field) > 1:
            raise UserError(f"{url}: several columns are called {field!r}; rename all but one.")
        kind = schema.field(field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        if not any(is_kind(kind) for is_kind in is_text):  # null: as writers type a column without a value
            raise UserError(f"{url}: column {field!r} is not text; set data.text_field.")
        number = 0
        for batch in file.iter_batches(columns=[field], batch_size=1024):
            column = batch.column(batch.schema.get_field_index(field))  # "a.b" selects field b of a struct a too
            try:
                documents = column.to_pylist()
            except UnicodeDecodeError:  # Parquet does not check that text is UTF-8
                documents = column.cast(kind).cast(pa.large_binary()).to_pylist()
            for document in documents:
                number += 1
                row_name = f"row {number:,}"
                if isinstance(document, bytes):
                    document = _decode_row(document, f"{url}, {row_name},", config, statistics)
                if document is not None:
                    yield row_name, document
