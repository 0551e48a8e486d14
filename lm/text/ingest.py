"""Build the training and validation text from sources: the work of the stage ``ingest``.

Groups of sources are read independently, in parallel. :func:`combine_groups` then decides what is validation text.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain, count, groupby, pairwise
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.documents import split_documents, stream_documents
from lm.text.foreign_formats import text_format
from lm.text.held_out import DocumentHash, find_cut_before
from lm.text.repeated_text import list_some
from lm.text.sources import (
    ByteRanges,
    Source,
    can_read_in_place,
    check_unchanged,
    check_version,
    detect_format,
    is_local_file,
    open_ranges,
    source_version,
)
from lm.text.special_texts import SpecialTextCounter, join_adjacent, rows_of_copy
from lm.text.statistics import TextStatistics
from lm.text.utf8 import decode_utf8_blocks

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
        del content["digests"]
        for part in (content, *content["kept"]):
            for name in ("rows", "held_out_rows", "separator"):
                if not part.get(name, True):
                    del part[name]
        return content


@dataclass(frozen=True)
class Selection:
    """A part of a split: the texts that were kept of group number ``group``. Without a number: the text held out.

    With ``interval`` (start, end): these bytes of all texts of the group, one after the other, also those held out.
    """

    group: int | None
    interval: tuple[int, int] | None = None

    def texts(self, group: GroupTexts) -> list[tuple[Text, ByteRanges]]:
        """Return the texts of the selection, each with its byte ranges."""
        if self.interval is None:
            return [(text, text.ranges) for text in group.kept if text.ranges]
        start, end = self.interval
        selected: list[tuple[Text, ByteRanges]] = []
        for text, before in zip(group.kept, accumulate((text.bytes for text in group.kept), initial=0), strict=False):
            first, last = max(0, start - before), min(text.bytes, end - before)
            if first < last:
                selected.append((text, [(first, last)]))
        return selected


@dataclass
class Split:
    """The training or the validation text: its selections, each with its size in bytes, and its statistics."""

    selections: list[tuple[Selection, int]]
    statistics: TextStatistics


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
    ``special_tokens`` is ordinary in documents of JSON Lines and Parquet. Raises UserError for invalid input.
    """
    others, limit = [token for token in special_tokens if token != config.separator], int(fraction * 2**64)
    readers = _read_sources(sources, lambda: _TextReader(config, limit, SpecialTextCounter(others)), out)
    _warn_about_formats(readers)
    group = GroupTexts()
    held_out_path = out / HELD_OUT
    with held_out_path.open("wb") as file:
        for reader in readers:
            text, held_out = reader.text, reader.held_out_ranges
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
    text: Text = field(default_factory=lambda: Text(None, None, 0, []))
    version: tuple[int, str] | None = None  # of the source, if the text stays in place
    size: int = 0
    held_out_ranges: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Byte ranges of JSON Lines and Parquet."""
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

    def read(self, source: Source) -> Iterator[bytes]:
        """Yield the documents of a source as UTF-8. Raises UserError if it has changed since it was hashed.

        Parquet is not read in order. So it is read again to compare it, if it is local.
        """
        document, digest, documents = DocumentHash(), hashlib.sha256(), hashlib.sha256()
        start, is_rows = self.size, detect_format(source.url)[0] != "text"
        is_first = not is_rows
        for piece in stream_documents(source.url, self.config, self.statistics, digest):
            if is_first and (name := text_format(source.url, piece)):
                self.formats.setdefault(name, []).append(source.url)
            is_first = False
            data = piece.encode()
            yield data
            documents.update(data)
            self.size += len(data)
            if is_rows:
                self.special_texts.update(data)
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
    """Read sources to texts. Plain files stay in place; consecutive other sources become one file in ``out``."""
    readers: list[_TextReader] = []
    file_numbers = count(1)
    checked = ((source, _read_in_place(source, number, make_reader())) for number, source in enumerate(sources))
    for is_copied, group in groupby(checked, key=lambda item: item[1] is None):
        if not is_copied:
            readers += [reader for _, reader in group if reader]
            continue
        number, reader = next(file_numbers), make_reader()
        path = out / ("text.txt" if number == 1 else f"text-{number}.txt")
        with path.open("wb") as file:
            for source, _ in group:
                file.writelines(reader.read(source))
        if reader.size:
            reader.text = Text(path.name, None, reader.size, [])
            readers.append(reader)
        else:
            path.unlink()
    return readers


def _read_in_place(source: Source, number: int, reader: _TextReader) -> _TextReader | None:
    """Read plain text without a copy. Returns None if a copy is needed."""
    if not can_read_in_place(source.url):
        return None
    reader.text, reader.version = Text(None, number, source.bytes, []), source_version(source.url)
    for _ in reader.read(source):
        pass
    return None if reader.statistics.replaced else reader


def combine_groups(
    train: Sequence[GroupTexts],
    valid: Sequence[GroupTexts],
    config: DataConfig,
    fraction: float,
    url_of: Callable[[int, Text], str],
) -> dict[str, Split]:
    """Return the splits ``train`` and ``valid``. Groups are numbered over ``train`` and then ``valid``.

    ``fraction`` is what :func:`read_group` held out of ``train``, without groups in ``valid``. If that left a split
    without a document, the last documents become the validation text, or the end of the last one. ``url_of`` returns
    the path or URL of a text of a group, to read it there. Raises UserError if there is no text for training.
    """
    if not any(text.bytes for group in train for text in group.kept):
        raise UserError("The sources hold no text: data.train has no document.")
    splits = {"train": _kept_texts(train, 0), "valid": _kept_texts(valid, len(train))}
    if fraction:
        if fraction < config.valid_fraction:
            log.info("Validation text: %g %% of the documents, because of data.valid_max_bytes.", 100 * fraction)
        held_out = [(Selection(None), sum(group.held_out_bytes for group in train))]
        splits["valid"] = Split(held_out, _total(group.held_out_statistics for group in train))
        if not all(split.statistics.documents for split in splits.values()):
            splits = _split_at_end(
                train, _total(split.statistics for split in splits.values()), fraction, config.separator, url_of
            )
    for name, split in splits.items():
        statistics, split.selections = split.statistics, [item for item in split.selections if item[1]]
        if statistics.documents == 1:
            log.info("The %s text is one document. The separator %r would end each of several.", name, config.separator)
        if statistics.replaced:
            log.warning("The %s text: replaced %s invalid UTF-8 sequences.", name, f"{statistics.replaced:,}")
        if statistics.separators_removed:
            log.warning("The %s text: removed %s separators.", name, f"{statistics.separators_removed:,}")
    return splits


def join_held_out(groups: Sequence[GroupTexts], paths: Iterable[Path], joined: Path) -> GroupTexts:
    """Write the held-out texts of groups, one after the other, to ``joined``. Return it as the text of a group."""
    rows: list[tuple[int, int]] = []
    with joined.open("wb") as file:
        for group, path in zip(groups, paths, strict=True):
            rows += [(file.tell() + start, file.tell() + end) for start, end in group.held_out_rows]
            with path.open("rb") as part:
                shutil.copyfileobj(part, file)
        size = file.tell()
    text = Text(joined.name, None, size, [(0, size)], join_adjacent(rows))
    return GroupTexts([text], separator=next((group.separator for group in groups if group.held_out_rows), ""))


def _kept_texts(groups: Sequence[GroupTexts], first: int) -> Split:
    selections = [(Selection(number), _size(group.kept)) for number, group in enumerate(groups, first)]
    return Split(selections, _total(group.kept_statistics for group in groups))


def _size(texts: Iterable[Text]) -> int:
    return sum(end - start for text in texts for start, end in text.ranges)


def _total(statistics: Iterable[TextStatistics]) -> TextStatistics:
    return sum(statistics, start=TextStatistics())


def _split_at_end(
    groups: Sequence[GroupTexts],
    statistics: TextStatistics,
    fraction: float,
    separator: str,
    url_of: Callable[[int, Text], str],
) -> dict[str, Split]:
    """Split the concatenated texts at the document border nearest to their last ``fraction`` of bytes.

    If each border would hold out more than twice the fraction, the cut is inside a document, between two pretokens.
    """
    if not statistics.documents:
        raise UserError("The sources hold only white space: data.train has no document.")
    texts = [(url_of(number, text), text.bytes) for number, group in enumerate(groups) for text in group.kept]
    total = sum(size for _, size in texts)
    offset = int(total * (1 - fraction))
    tail_start, _ = _find_cut(texts, max(0, int(total * (1 - 2 * fraction))), separator)
    if borders := [end for end, _ in _stream_document_ends(texts, tail_start, separator)][:-1]:
        cut, is_border = min(borders, key=lambda border: abs(border - offset)), True
    else:
        cut, is_border = _find_cut(texts, offset, separator)
    if not cut:
        raise UserError(
            f"The text has no place where its last {100 * fraction:.3g} % can be set aside for validation: no "
            f"separator {separator!r} inside, no white space after other text. Give data.valid, or set "
            "data.valid_fraction to 0."
        )
    lengths = [length for _, length in _stream_document_ends(texts, cut, separator)]
    valid_statistics = _count_documents(lengths)
    train_statistics = statistics - _count_documents(lengths if is_border else lengths[1:])
    if not train_statistics.documents or not lengths:
        raise UserError("The text is too short to set a validation fraction aside; set data.valid_fraction to 0.")
    log.info(
        "The choice of documents by their hash left the training or the validation text empty. So the last %.3g %% of "
        "the text are the validation text: %d of %d documents%s.",
        100 * (total - cut) / total,
        len(lengths),
        statistics.documents,
        "" if is_border else ", and the first of them only from white space on",
    )
    splits = {"train": Split([], train_statistics), "valid": Split([], valid_statistics)}
    starts = [*accumulate((sum(text.bytes for text in group.kept) for group in groups), initial=0)]
    for number, (start, end) in enumerate(pairwise(starts)):
        for name, first, last in (("train", start, min(cut, end)), ("valid", max(cut, start), end)):
            if first < last:
                selection = Selection(number, interval=(first - start, last - start))
                splits[name].selections.append((selection, last - first))
    return splits


def _count_documents(lengths: Iterable[int]) -> TextStatistics:
    statistics = TextStatistics()
    for length in lengths:
        statistics.add_document(length)
    return statistics


def _find_cut(texts: Sequence[tuple[str, int]], offset: int, separator: str) -> tuple[int, bool]:
    """Return the last place <= ``offset`` in concatenated texts at which a cut changes no pretoken, and whether it is a
    document border. ``texts`` are (path or URL, bytes)."""
    before = 0
    for url, size in texts:
        if offset < before + size:
            cut = find_cut_before(url, offset - before, separator)
            with open_ranges(url, [(max(0, cut - len(separator.encode())), cut)]) as blocks:
                return before + cut, not cut or b"".join(blocks) == separator.encode()
        before += size
    return before, True


def _stream_document_ends(texts: Sequence[tuple[str, int]], start: int, separator: str) -> Iterator[tuple[int, int]]:
    """Yield the end of each document in the concatenated texts from byte ``start``, and its length in characters."""
    before = 0
    for url, size in texts:
        first = max(0, start - before)
        if first < size:
            end, document = before + first, DocumentHash()
            with open_ranges(url, [(first, size)]) as blocks:
                for piece in split_documents(decode_utf8_blocks(blocks, url), separator):
                    end += len(piece.encode())
                    document.update(piece.removesuffix(separator))
                    if piece.endswith(separator):
                        yield min(end, before + size), document.length  # the last document may lack its separator
                        document = DocumentHash()
        before += size
