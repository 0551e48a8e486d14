"""The training and the validation text: which documents are held out, by their hash or at the end of the text."""

import logging
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.document_metadata import METADATA, MetadataTables
from lm.text.documents import DocumentHash, TextStatistics, split_documents
from lm.text.ingest import HELD_OUT, GroupTexts, Text
from lm.text.pretokenize import find_safe_cut
from lm.text.sources import ByteRanges, open_ranges
from lm.text.special_texts import join_adjacent
from lm.text.utf8 import decode_utf8_blocks

log = logging.getLogger(__name__)

_WINDOW_BYTES = 1 << 16  # first read backwards from the requested cut


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


def valid_fraction(config: DataConfig, stored_bytes: int) -> float:
    """Return ``config.valid_fraction``, halved until it is at most ``config.valid_max_bytes`` of ``stored_bytes``.

    Halving keeps the choice of documents stable: it changes only when the sources double, and then to a subset.
    """
    fraction = config.valid_fraction
    while config.valid_max_bytes and fraction * stored_bytes > config.valid_max_bytes:
        fraction /= 2
    return fraction


def combine_groups(
    train: Sequence[GroupTexts],
    valid: Sequence[GroupTexts],
    config: DataConfig,
    fraction: float,
    url_of: Callable[[int, Text], str],
) -> dict[str, Split]:
    """Return the splits ``train`` and ``valid``. Groups are numbered over ``train`` and then ``valid``.

    Without ``valid``, :func:`lm.text.ingest.read_group` held out ``fraction`` of the documents. If one split is then
    empty, the last documents become the validation text, or the end of the last one. ``url_of`` returns the path or URL
    of a text of a group, to read it there. Raises UserError if there is no text for training.
    """
    if not any(text.bytes for group in train for text in group.kept):
        raise UserError("The sources hold no text: data.train, or a source of data.mix, has no document.")
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


def join_held_out(
    groups: Sequence[GroupTexts], paths: Iterable[Path], joined: Path, metadata: Sequence[Path | None] = ()
) -> GroupTexts:
    """Write the held-out texts of groups, one after the other, to ``joined``. Return it as the text of a group.

    ``metadata`` are the files ``metadata.parquet`` of the groups that have one; another is written beside ``joined``.
    """
    rows: list[tuple[int, int]] = []
    tables = MetadataTables()
    with joined.open("wb") as file:
        for group, path, described in zip_longest(groups, paths, metadata):
            if described:
                tables.add_copy(described, HELD_OUT, joined.name, file.tell())
            rows += [(file.tell() + start, file.tell() + end) for start, end in group.held_out_rows]
            with path.open("rb") as part:
                shutil.copyfileobj(part, file)
        size = file.tell()
    tables.write(joined.with_name(METADATA))
    text = Text(joined.name, None, size, [(0, size)], join_adjacent(rows))
    return GroupTexts([text], separator=next((group.separator for group in groups if group.held_out_rows), ""))


def _kept_texts(groups: Sequence[GroupTexts], first: int) -> Split:
    sizes = [sum(end - start for text in group.kept for start, end in text.ranges) for group in groups]
    selections = [(Selection(number), size) for number, size in enumerate(sizes, first)]
    return Split(selections, _total(group.kept_statistics for group in groups))


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
        raise UserError("The sources hold only white space: data.train, or a source of data.mix, has no document.")
    texts = [(url_of(number, text), text.bytes) for number, group in enumerate(groups) for text in group.kept]
    total = sum(size for _, size in texts)
    offset = int(total * (1 - fraction))
    tail_start, _ = _find_cut(texts, max(0, int(total * (1 - 2 * fraction))), separator)
    ends = list(_stream_document_ends(texts, tail_start, separator))
    if len(ends) > 1:
        cut, is_border = min((end for end, _ in ends[:-1]), key=lambda end: abs(end - offset)), True
    else:
        cut, is_border = _find_cut(texts, offset, separator)
        ends = list(_stream_document_ends(texts, cut, separator))
    if not cut:
        raise UserError(
            f"The text has no place where its last {100 * fraction:.3g} % can be set aside for validation: no "
            f"separator {separator!r} inside, no white space after other text. Give data.valid, or set "
            "data.valid_fraction to 0."
        )
    valid, moved = TextStatistics(), TextStatistics()  # moved: as a whole, so that nothing is left for training
    for number, length in enumerate(length for end, length in ends if end > cut):
        valid.add_document(length)
        if number or is_border:
            moved.add_document(length)
    train = statistics - moved
    if not train.documents or not valid.documents:
        raise UserError("The text is too short to set a validation fraction aside; set data.valid_fraction to 0.")
    log.info(
        "The choice of documents by their hash left the training or the validation text empty. So the last %.3g %% of "
        "the text are the validation text: %d of %d documents%s.",
        100 * (total - cut) / total,
        valid.documents,
        statistics.documents,
        "" if is_border else ", and the first of them only from white space on",
    )
    splits = {"train": Split([], train), "valid": Split([], valid)}
    starts = [*accumulate((sum(text.bytes for text in group.kept) for group in groups), initial=0)]
    for number, (start, end) in enumerate(pairwise(starts)):
        for name, first, last in (("train", start, min(cut, end)), ("valid", max(cut, start), end)):
            if first < last:
                selection = Selection(number, interval=(first - start, last - start))
                splits[name].selections.append((selection, last - first))
    return splits


def _find_cut(texts: Sequence[tuple[str, int]], offset: int, separator: str) -> tuple[int, bool]:
    """Return the last place <= ``offset`` in concatenated texts at which a cut changes no pretoken, and whether it is a
    document border. ``texts`` are (path or URL, bytes)."""
    starts = [*accumulate((size for _, size in texts), initial=0)]
    number = bisect_right(starts, offset) - 1
    if number == len(texts):
        return starts[-1], True
    url, before, window = texts[number][0], starts[number], _WINDOW_BYTES
    end = offset - before
    while True:
        start = max(0, end - window)
        with open_ranges(url, [(start, end)]) as blocks:
            data = b"".join(blocks)
        # The window may begin inside a character: with bytes that are not the first of one.
        whole = data.lstrip(bytes(range(0x80, 0xC0))) if start else data
        text = whole.decode("utf-8", "replace")  # and end inside one
        cut = find_safe_cut(text, [separator])
        if not start or cut > len(separator):  # a separator may begin before the window
            first = before + start + len(data) - len(whole)
            return (first + len(text[:cut].encode()), text[:cut].endswith(separator)) if cut else (before, True)
        window *= 4


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
