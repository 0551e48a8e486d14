"""Ingestion: read groups of sources to text, and hold out documents for validation by their hash.

Groups are read independently, in parallel. :func:`lm.text.held_out.combine_groups` then decides what is validation
text.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from lm.files.compression import detect_format, text_format
from lm.files.urls import file_version
from lm.text.config import DataConfig
from lm.text.document_metadata import METADATA, DocumentRows, MetadataTables
from lm.text.documents import DocumentHash, TextStatistics, stream_documents
from lm.text.sources import (
    Source,
    can_read_in_place,
    check_unchanged,
    check_version,
    is_local_file,
    list_some,
    open_ranges,
)
from lm.text.special_texts import SpecialTextCounter, join_adjacent, rows_of_copy
from lm.text.web_pages import WebPages, is_web_format

log = logging.getLogger(__name__)

_MAX_GROUP_BYTES = 1 << 30  # of stored sources; a larger source is a group of its own
_MAX_GROUP_SOURCES = 1024
HELD_OUT = "held-out.txt"  # the documents of a group that are held out


@dataclass(frozen=True)
class Text:
    """UTF-8 text of ``bytes`` bytes, and the byte ``ranges`` (start, end) that belong to a split, in ascending order.

    The text is in ``file``, which :func:`read_group` wrote, or in source number ``source`` of the group.
    """

    file: str | None
    source: int | None
    bytes: int
    ranges: list[tuple[int, int]]
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Byte ranges of JSON Lines and Parquet, if special tokens occur in them as ordinary text. In these ranges only the
    separator is a token."""


@dataclass
class GroupTexts:
    """The texts of a group of sources. Their ranges leave out the documents copied to ``held-out.txt``."""

    kept: list[Text] = field(default_factory=list)
    held_out_bytes: int = 0
    """Size of ``held-out.txt``; if it is 0, there is no file."""
    kept_statistics: TextStatistics = field(default_factory=TextStatistics)
    """Also counts the replacements and removals in the documents held out."""
    held_out_statistics: TextStatistics = field(default_factory=TextStatistics)
    held_out_rows: list[tuple[int, int]] = field(default_factory=list)
    """As ``Text.rows``, of ``held-out.txt``."""
    separator: str = ""
    """The separator, if there are rows."""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the documents of each source, by its URL; not in ``texts.json``. It finds equal text in two formats.
    """
    skipped_pages: dict[str, Any] = field(default_factory=dict)
    """:meth:`WebPages.to_json`, if there are sources of web pages; not in ``texts.json``."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "GroupTexts":
        """Read the content of ``texts.json``."""
        return cls(
            [Text(**text) for text in content["kept"]],
            content["held_out_bytes"],
            TextStatistics(**content["kept_statistics"]),
            TextStatistics(**content["held_out_statistics"]),
            content.get("held_out_rows", []),
            content.get("separator", ""),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``texts.json``. Fields about rows are left out if they are empty."""
        content = asdict(self)
        del content["digests"], content["skipped_pages"]
        for part in (content, *content["kept"]):
            for name in ("rows", "held_out_rows", "separator"):
                if not part.get(name, True):
                    del part[name]
        return content


def group_sources(sources: Iterable[Source]) -> list[list[Source]]:
    """Return groups of consecutive sources of about 1 GiB as stored. Appended sources change only the last group."""
    groups: list[list[Source]] = []
    size = 0
    for source in sources:
        if not groups or size + source.bytes > _MAX_GROUP_BYTES or len(groups[-1]) == _MAX_GROUP_SOURCES:
            groups.append([])
            size = 0
        groups[-1].append(source)
        size += source.bytes
    return groups


def read_group(
    sources: Sequence[Source], config: DataConfig, fraction: float, out: Path, special_tokens: Collection[str] = ()
) -> GroupTexts:
    """Read the documents of a group of sources, and hold out about ``fraction`` of them for validation.

    Plain text that allows reads of byte ranges stays in place. Other sources are written to ``text.txt``,
    ``text-2.txt``, … in the directory ``out``. Documents held out are copied to ``held-out.txt``. The text of
    ``special_tokens`` is ordinary in documents of JSON Lines, Parquet and web pages. The metadata of web pages are
    written to ``metadata.parquet``. Raises UserError for invalid input.
    """
    others, limit = [token for token in special_tokens if token != config.separator], int(fraction * 2**64)
    pages = WebPages()
    try:
        readers = _read_sources(sources, lambda: _TextReader(config, limit, SpecialTextCounter(others), pages), out)
    finally:
        pages.reader.close()
    _warn_about_formats(readers)
    group, metadata = GroupTexts(), MetadataTables()
    if any(is_web_format(source.url) for source in sources):
        group.skipped_pages = pages.to_json()
    held_out_path = out / HELD_OUT
    with held_out_path.open("wb") as file:
        for reader in readers:
            text, held_out = reader.text, reader.held_out_ranges
            if text.file and reader.metadata:
                metadata.add_split(text.file, reader.metadata, held_out, HELD_OUT, file.tell())
            rows = reader.rows if reader.special_texts.total else []
            if rows:
                group.separator = config.separator
                group.held_out_rows += rows_of_copy(held_out, rows, file.tell())
            if held_out:
                with open_ranges(
                    str(out / text.file) if text.file else sources[text.source or 0].url, held_out
                ) as blocks:
                    file.writelines(blocks)
                if text.source is not None:
                    check_version(sources[text.source], reader.version)
                if held_out[-1][1] > text.bytes:  # the last document lacks its separator in the file
                    file.write(config.separator.encode())
            edges = [0, *chain.from_iterable(held_out), text.bytes]
            kept = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
            group.kept.append(replace(text, ranges=kept, rows=rows))
            group.digests |= reader.digests
            group.kept_statistics += reader.kept_statistics
            group.held_out_statistics += reader.held_out_statistics
        group.held_out_bytes = file.tell()
    if not group.held_out_bytes:
        held_out_path.unlink()
    metadata.write(out / METADATA)
    return group


@dataclass
class _TextReader:
    """Read the documents of one text and choose those for validation.

    A document is chosen if its hash is below ``hash_limit``. So the choice depends neither on the order nor on the
    number nor on the file format of the documents. ``held_out_ranges`` are the byte ranges of the chosen documents.
    """

    config: DataConfig
    hash_limit: int
    special_texts: SpecialTextCounter
    """Counts the texts of special tokens in ``rows``."""
    pages: WebPages
    text: Text = field(default_factory=lambda: Text(None, None, 0, []))
    version: tuple[int, str] | None = None  # of the source, if the text stays in place
    size: int = 0
    held_out_ranges: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Byte ranges of JSON Lines, Parquet and web pages."""
    metadata: DocumentRows = field(default_factory=DocumentRows)
    """Of web pages."""
    statistics: TextStatistics = field(default_factory=TextStatistics)
    held_out_statistics: TextStatistics = field(default_factory=TextStatistics)
    digests: dict[str, str] = field(default_factory=dict)
    """As ``GroupTexts.digests``."""
    formats: dict[str, list[str]] = field(default_factory=dict)
    """URLs of the plain texts that begin like another format, by that format."""
    _kept_statistics: TextStatistics = field(default_factory=TextStatistics)
    _document_start: int = 0  # blank text at the end of a source belongs to the next document

    @property
    def kept_statistics(self) -> TextStatistics:
        """Statistics of the documents that are not held out, and of all replacements and removals."""
        if not self.hash_limit:
            return self.statistics
        replaced, removed = self.statistics.replaced, self.statistics.separators_removed
        return replace(self._kept_statistics, replaced=replaced, separators_removed=removed)

    def read(self, source: Source, number: int) -> Iterator[bytes]:
        """Yield the documents of source ``number`` as UTF-8. Raises UserError if it has changed since it was hashed.

        Parquet is not read in order. So it is read again to compare it, if it is local.
        """
        document, digest, documents = DocumentHash(), hashlib.sha256(), hashlib.sha256()
        start, is_rows = self.size, detect_format(source.url)[0] != "text"
        is_first, is_web = not is_rows, is_web_format(source.url)
        for piece in stream_documents(source.url, self.config, self.statistics, digest, self.pages):
            if is_first and (name := text_format(source.url, piece)):
                self.formats.setdefault(name, []).append(source.url)
            is_first = False
            data = piece.encode()
            yield data
            documents.update(data)
            self.size += len(data)
            if is_rows:
                self.special_texts.update(data)
            if is_web:
                self.metadata.add(number, self.size - len(data), self.size, self.pages.metadata)
            if not self.hash_limit:
                continue
            document.update(piece.removesuffix(self.config.separator))
            if not piece.endswith(self.config.separator):
                continue
            if document.value < self.hash_limit:
                self.held_out_ranges.append((self._document_start, self.size))
                self.held_out_statistics.add_document(document.length)
            else:
                self._kept_statistics.add_document(document.length)
            self._document_start, document = self.size, DocumentHash()
        if start < self.size:
            self.digests[source.url] = documents.hexdigest()
        if is_rows and start < self.size:
            self.rows = join_adjacent([*self.rows, (start, self.size)])
        if detect_format(source.url)[0] != "parquet":
            check_unchanged(source, digest.hexdigest())
        elif is_local_file(source.url):
            check_unchanged(source)


def _warn_about_formats(readers: Iterable[_TextReader]) -> None:
    for name, items in groupby(
        sorted((name, url) for reader in readers for name, urls in reader.formats.items() for url in urls),
        key=lambda item: item[0],
    ):
        log.warning(
            "Read as plain text, markup included, though it looks like %s: %s. For one document a row, give JSON Lines "
            "(.jsonl) or Parquet.",
            name,
            list_some(url for _, url in items),
        )


def _read_sources(sources: Sequence[Source], make_reader: Callable[[], _TextReader], out: Path) -> list[_TextReader]:
    """Read sources to texts. Plain files without replacements stay in place; other sources in a row become one file."""
    readers: list[_TextReader] = []
    copies: list[Path] = []
    is_copied = False
    for number, source in enumerate(sources):
        if can_read_in_place(source.url):
            reader = make_reader()
            reader.text, reader.version = Text(None, number, source.bytes, []), file_version(source.url)
            deque(reader.read(source, number), maxlen=0)
            if not reader.statistics.replaced:
                readers.append(reader)
                is_copied = False
                continue
        if not is_copied:
            readers.append(make_reader())
            copies.append(out / ("text.txt" if not copies else f"text-{len(copies) + 1}.txt"))
        with copies[-1].open("ab" if is_copied else "wb") as file:
            file.writelines(readers[-1].read(source, number))
        readers[-1].text = Text(copies[-1].name, None, readers[-1].size, [])
        is_copied = True
    for path in copies:
        if not path.stat().st_size:
            path.unlink()
    return [reader for reader in readers if reader.size]
