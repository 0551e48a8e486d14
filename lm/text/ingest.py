"""Build the training and validation text from sources: the work of the stage ``ingest``."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.documents import stream_documents
from lm.text.pretokenize import find_safe_cut
from lm.text.sources import Source, can_read_in_place, open_ranges
from lm.text.statistics import TextStatistics
from lm.text.utf8 import decode_utf8_blocks

log = logging.getLogger(__name__)

_WINDOW_BYTES = 1 << 16  # first read backwards from the wanted cut
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # all but the first byte of a UTF-8 character


@dataclass(frozen=True)
class Text:
    """UTF-8 text: byte ``ranges`` (start, end), in ascending order, of a file.

    The file is ``file``, which ingest wrote, or else source number ``source``, which is not copied. The gaps between
    ranges are documents of the other split.
    """

    file: str | None
    source: int | None
    ranges: list[tuple[int, int]]

    @property
    def bytes(self) -> int:
        """Length in bytes."""
        return sum(end - start for start, end in self.ranges)


@dataclass
class _Split:
    """The texts of the training or of the validation split."""

    texts: list[Text] = field(default_factory=list)
    statistics: TextStatistics = field(default_factory=TextStatistics)

    @property
    def bytes(self) -> int:
        return sum(text.bytes for text in self.texts)


def ingest_sources(train: Sequence[Source], valid: Sequence[Source], config: DataConfig, out: Path) -> dict[str, Any]:
    """Build the texts of both splits. Returns the content of ``texts.json``: ``train`` and ``valid``, each a list of
    :class:`Text` as dicts, and ``statistics`` of each.

    Plain text of which ranges can be read is referenced by the number of its source, counted over ``train`` and then
    ``valid``. Other sources are written
    to ``train.txt`` or ``valid.txt`` in the directory ``out``. If ``valid`` is empty, some documents of ``train`` are
    copied to ``valid.txt`` and left out of the ranges of the training text. Raises UserError for invalid input.
    """
    if valid or not config.valid_fraction:
        splits = {}
        for name, sources, first in (("train", train, 0), ("valid", valid, len(train))):
            readers = _read_sources(name, sources, first, config, out)
            splits[name] = _Split([reader.text for reader in readers], _total(reader.statistics for reader in readers))
    else:
        splits = dict(zip(("train", "valid"), _hold_out(train, config, out), strict=True))
    for name, split in splits.items():
        statistics = split.statistics
        if statistics.documents == 1:
            log.info("The %s text is one document: it contains no separator %s.", name, config.separator)
        if statistics.replaced:
            log.warning("The %s text: replaced %s invalid UTF-8 sequences.", name, f"{statistics.replaced:,}")
        if statistics.separators_removed:
            log.warning("The %s text: removed %s separators.", name, f"{statistics.separators_removed:,}")
    if not splits["train"].bytes:
        raise UserError("The sources hold no text: data.train has no document.")
    return {
        **{name: [asdict(text) for text in split.texts] for name, split in splits.items()},
        "statistics": {name: {**asdict(split.statistics), "bytes": split.bytes} for name, split in splits.items()},
    }


def valid_fraction(config: DataConfig, stored_bytes: int) -> float:
    """Return ``config.valid_fraction``, halved until it is at most ``config.valid_max_bytes`` of ``stored_bytes``.

    Halving keeps the choice of documents stable: it changes only when the sources double, and then to a subset.
    """
    fraction = config.valid_fraction
    while config.valid_max_bytes and fraction * stored_bytes > config.valid_max_bytes:
        fraction /= 2
    return fraction


def _total(statistics: Iterable[TextStatistics]) -> TextStatistics:
    return sum(statistics, start=TextStatistics())


@dataclass
class _DocumentHash:
    """SHA-256 and length in characters of a document without surrounding white space, from its pieces.

    White space is hashed when it is read, and the digest before it kept, so that long white space needs no memory.
    """

    length: int = 0
    _characters_read: int = 0  # from the first non-blank character
    _running: Any = field(default_factory=hashlib.sha256)
    _digest: Any = field(default_factory=hashlib.sha256)  # up to the last non-blank character

    def update(self, piece: str) -> None:
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


@dataclass
class _TextReader:
    """Read the documents of one text and choose those for validation.

    A document is chosen if its hash is below ``hash_limit``. So the choice depends neither on the order nor on the
    number nor on the file format of the documents. ``valid_ranges`` are the byte ranges of the chosen documents.
    """

    config: DataConfig
    hash_limit: int
    text: Text = field(default_factory=lambda: Text(None, None, []))
    size: int = 0
    valid_ranges: list[tuple[int, int]] = field(default_factory=list)
    statistics: TextStatistics = field(default_factory=TextStatistics)
    train_statistics: TextStatistics = field(default_factory=TextStatistics)
    valid_statistics: TextStatistics = field(default_factory=TextStatistics)
    _document_start: int = 0  # blank text at the end of a source belongs to the next document

    def read(self, url: str) -> Iterator[bytes]:
        """Yield the documents of a source as UTF-8."""
        document = _DocumentHash()
        for piece in stream_documents(url, self.config, self.statistics):
            data = piece.encode()
            yield data
            self.size += len(data)
            if not self.hash_limit:
                continue
            document.update(piece.removesuffix(self.config.separator))
            if not piece.endswith(self.config.separator):
                continue
            if document.value < self.hash_limit:
                self.valid_ranges.append((self._document_start, self.size))
                self.valid_statistics.add_document(document.length)
            else:
                self.train_statistics.add_document(document.length)
            self._document_start, document = self.size, _DocumentHash()


def _read_sources(
    name: str, sources: Sequence[Source], first: int, config: DataConfig, out: Path, fraction: float = 0.0
) -> list[_TextReader]:
    """Read sources to texts. Plain files stay in place; consecutive other sources become one file in ``out``."""
    hash_limit = int(fraction * 2**64)
    readers: list[_TextReader] = []
    file_numbers = count(1)
    checked = (
        (source, _read_in_place(source, number, config, hash_limit)) for number, source in enumerate(sources, first)
    )
    for is_copied, group in groupby(checked, key=lambda item: item[1] is None):
        if not is_copied:
            readers += [reader for _, reader in group if reader]
            continue
        number, reader = next(file_numbers), _TextReader(config, hash_limit)
        path = out / (f"{name}.txt" if number == 1 else f"{name}-{number}.txt")
        with path.open("wb") as file:
            for source, _ in group:
                file.writelines(reader.read(source.url))
        if reader.size:
            reader.text = Text(path.name, None, [(0, reader.size)])
            readers.append(reader)
        else:
            path.unlink()
    return readers


def _read_in_place(source: Source, number: int, config: DataConfig, hash_limit: int) -> _TextReader | None:
    """Read plain text without a copy. Returns None if a copy is needed."""
    if not can_read_in_place(source.url):
        return None
    reader = _TextReader(config, hash_limit, Text(None, number, [(0, source.bytes)]))
    for _ in reader.read(source.url):
        pass
    if reader.statistics.replaced:
        return None
    if reader.size - source.bytes not in (0, len(config.separator.encode())):  # the last document may lack it
        raise UserError(f"{source.url} changed while the pipeline ran; run it again.")
    return reader


def _hold_out(sources: Sequence[Source], config: DataConfig, out: Path) -> tuple[_Split, _Split]:
    """Split documents into training and validation by hash, or the text at its end if there are too few documents."""
    fraction = valid_fraction(config, sum(source.bytes for source in sources))
    if fraction < config.valid_fraction:
        log.info("Validation text: %g %% of the documents, because of data.valid_max_bytes.", 100 * fraction)
    readers = _read_sources("train", sources, 0, config, out, fraction)
    if not readers:
        return _Split(), _Split()
    texts = [reader.text for reader in readers]
    paths = [str(out / text.file) if text.file else sources[text.source or 0].url for text in texts]
    total = _total(reader.statistics for reader in readers)
    train = _Split([], _total(reader.train_statistics for reader in readers))
    valid = _Split([], _total(reader.valid_statistics for reader in readers))
    if not train.statistics.documents or not valid.statistics.documents:
        log.info(
            "Too few documents (%d) to hold out a fraction: the last %g %% of the text are the validation text.",
            total.documents,
            100 * fraction,
        )
        return _split_at_end(texts, paths, total, fraction, config.separator)
    train.statistics.replaced, train.statistics.separators_removed = total.replaced, total.separators_removed
    with (out / "valid.txt").open("wb") as file:
        for path, text, held_out in zip(paths, texts, (reader.valid_ranges for reader in readers), strict=True):
            if held_out:
                with open_ranges(path, held_out) as blocks:
                    file.writelines(blocks)
                if held_out[-1][1] > text.bytes:  # the last document lacks its separator in the file
                    file.write(config.separator.encode())
            edges = [0, *chain.from_iterable(held_out), text.bytes]
            kept = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
            train.texts += [replace(text, ranges=kept)] if kept else []
        valid.texts.append(Text("valid.txt", None, [(0, file.tell())]))
    return train, valid


def _split_at_end(
    texts: Sequence[Text], paths: Sequence[str], statistics: TextStatistics, fraction: float, separator: str
) -> tuple[_Split, _Split]:
    """Split the concatenated texts before their last ``fraction`` of bytes, between two pretokens."""
    number, offset = 0, int(sum(text.bytes for text in texts) * (1 - fraction))
    while number + 1 < len(texts) and offset >= texts[number].bytes:
        offset -= texts[number].bytes
        number += 1
    text, cut = texts[number], _find_cut_before(paths[number], offset, separator)
    train = [*texts[:number], *([replace(text, ranges=[(0, cut)])] if cut else [])]
    valid = [*([replace(text, ranges=[(cut, text.bytes)])] if cut < text.bytes else []), *texts[number + 1 :]]
    if not train or not valid:
        raise UserError("The text is too short to set a validation fraction aside; set data.valid_fraction to 0.")
    valid_statistics = TextStatistics()
    for path, text in zip(paths[-len(valid) :], valid, strict=True):
        with open_ranges(path, text.ranges) as blocks:
            valid_statistics.add_document(sum(map(len, decode_utf8_blocks(blocks, path))))
    return _Split(train, statistics), _Split(valid, valid_statistics)


def _find_cut_before(path: str, offset: int, separator: str) -> int:
    """Return the last byte offset <= ``offset`` at which a cut of the file changes no pretoken; 0 if there is none."""
    window = _WINDOW_BYTES
    while True:
        start = max(0, offset - window)
        with open_ranges(path, [(start, offset)]) as blocks:
            data = b"".join(blocks)
        whole = data.lstrip(_CONTINUATION_BYTES) if start else data  # the window may begin inside a character
        text = whole.decode("utf-8", "replace")  # and end inside one
        cut = find_safe_cut(text, [separator])
        if not start or cut > len(separator):  # a separator may begin before the window
            return start + len(data) - len(whole) + len(text[:cut].encode()) if cut else 0
        window *= 4
