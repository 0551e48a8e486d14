"""Groups of texts and of chunks: the inputs of the stages that cut, count and encode text."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Event
from typing import Any

from lm.common.errors import Stopped, UserError
from lm.files.compression import read_blocks
from lm.text.chunks import Range
from lm.text.held_out import Selection
from lm.text.ingest import GroupTexts, Text
from lm.text.sources import ByteRanges, Source, open_raw
from tasks.runtime.output import Input, Output, Ref, json_digest, read_output
from tasks.runtime.run_context import RunContext
from tasks.runtime.schemas import parse_chunks
from tasks.runtime.store import Store

_MIN_GROUPS = 64
_MAX_GROUP_BYTES = 1 << 30  # of text

Ranges = list[tuple[str, Range]]  # each range with the path or URL of its text


@dataclass(frozen=True)
class OpenTextGroup:
    """A :class:`TextGroup` as a stage receives it."""

    output: Output
    separator: str
    """The separator, if there are rows: byte ranges in which only it is a token."""
    texts: list[tuple[Text, ByteRanges]]
    """The texts of the selection, each with the byte ranges that belong to it."""
    bytes_before: int

    @property
    def urls(self) -> list[str]:
        """Path or URL of each text."""
        return [text_url(self.output, text) for text, _ in self.texts]

    @property
    def sources(self) -> list[Source]:
        """Those of the texts that are sources, which stay in place."""
        return [source for text, _ in self.texts for source in text_sources(self.output, text)]


@dataclass(frozen=True)
class TextGroup(Input):
    """The part of a split that lies in one output: an entry of ``text_groups.json``."""

    output: Ref
    """Output of ``ingest-group``, or of ``ingest`` for the text held out."""
    digest: str
    """Its content digest."""
    selection: Selection
    bytes_before: int
    """Size of the split's text before this part."""
    source: str = ""
    """Name of the source of ``data.mix``; empty if the text has none. Not in the key: names do not decide chunks."""

    def identity(self, run: RunContext) -> list[Any]:
        """Return the part of the group that enters a key."""
        interval = self.selection.interval and list(self.selection.interval)
        return [self.digest, interval, self.bytes_before]

    def open(self, store: Store) -> OpenTextGroup:
        """Read the list of the texts. Raises UserError if a file of the group is damaged."""
        opened = self.read(store)
        if url := opened.output.find_damaged_url():
            raise UserError(f"{url} is damaged. Run the pipeline again: it makes it again.")
        return opened

    def read(self, store: Store) -> OpenTextGroup:
        """Read the list of the texts, whose files may be damaged."""
        output = read_output(store, self.output)
        group = read_texts(output)
        return OpenTextGroup(output, group.separator, self.selection.texts(group), self.bytes_before)

    def find_damaged_url(self, store: Store, opened: OpenTextGroup) -> str:
        """Return the path or URL of a damaged file of the output; empty if there is none."""
        return opened.output.find_damaged_url()


def read_texts(output: Output) -> GroupTexts:
    """Return the texts in an output of ``ingest-group`` or ``ingest``."""
    return GroupTexts.from_json(output.json("texts.json"))


def text_url(output: Output, text: Text) -> str:
    """Return the path or URL of a text, to read ranges of it."""
    return output.file_url(text.file) if text.file is not None else text_sources(output, text)[0].url


def text_sources(output: Output, text: Text) -> list[Source]:
    """Return the source that a text is; none if it is a file of the output."""
    if text.file is not None:
        return []
    try:
        return [Source(**output.manifest["sources"][text.source])]
    except (IndexError, TypeError):
        raise UserError(f"{output.url} refers to a source that it does not list. Refresh the ingest stage.") from None


def read_text_groups(store: Store, texts: Ref, groups: Sequence[Ref], split: str, source: str = "") -> list[TextGroup]:
    """Return the text groups of ``train`` or ``valid``. ``groups`` are the outputs of all groups of sources, and
    ``source`` is the name that these have in ``data.mix``."""
    result, bytes_before = [], 0
    combined = read_output(store, texts)
    for entry in combined.json("text_groups.json")[split]:
        selection = Selection(entry["group"], entry["interval"] and tuple(entry["interval"]))
        if selection.group is None:
            output, digest = texts, combined.digest
        elif selection.group < len(groups):
            output, digest = groups[selection.group], entry["digest"]
        else:
            raise UserError(f"Texts {texts.key[:12]} are of other sources. Refresh the ingest stage.")
        result.append(TextGroup(output, digest, selection, bytes_before, source))
        bytes_before += entry["bytes"]
    return result


def read_rewritten_groups(store: Store, groups: Sequence[TextGroup], outputs: Mapping[int, Ref]) -> list[TextGroup]:
    """Return groups of texts, some as a mapped stage wrote them, without those that are empty now.

    ``outputs``: the new outputs, by the number of the group. Other groups stay as they are.
    """
    result: list[TextGroup] = []
    opened = dict(zip(outputs, store.map(lambda ref: read_output(store, ref), [*outputs.values()]), strict=True))
    bytes_before = 0
    for number, group in enumerate(groups):
        bytes_before = bytes_before if group.bytes_before else 0  # the first group of a text
        if output := opened.get(number):
            group = replace(group, output=output.ref, digest=output.digest, selection=Selection(0))
        texts = group.read(store).texts
        if size := sum(end - start for _, ranges in texts for start, end in ranges):
            result.append(replace(group, bytes_before=bytes_before))
            bytes_before += size
    return result


@dataclass(frozen=True)
class ChunkGroup(Input):
    """Consecutive chunks, the input of a mapped stage: an entry of ``groups.json``. The body receives the ranges."""

    texts: TextGroup
    cut: Ref
    """Output of ``chunk-group``."""
    chunks: int
    sha256: str
    """Digest of the bytes of each range, whether its text ends there, and its ``separator``: what decides the tokens.
    """
    start: int
    end: int
    """The lines of the chunks are the bytes ``start`` to ``end`` of ``chunks.jsonl``."""

    def identity(self, run: RunContext) -> str:
        """Return the part of the group that enters a key."""
        return self.sha256

    def open(self, store: Store) -> Ranges:
        """Read the ranges. Raises UserError if they are damaged."""
        output = read_output(store, self.cut)
        ranges = parse_chunks(output.read_range("chunks.jsonl", self.start, self.end))
        if ranges is None or digest_of_ranges(ranges) != self.sha256:
            raise UserError(f"{output.file_url('chunks.jsonl')} is damaged. Run the pipeline again: it makes it again.")
        urls = self.texts.read(store).urls
        try:
            return [(urls[part["text"]], Range(**part)) for part in ranges]
        except IndexError:
            raise UserError(f"Chunks {self.cut.key[:12]} are of other texts. Refresh the chunk stage.") from None

    def find_damaged_url(self, store: Store, opened: Ranges) -> str:
        """Return the path or URL of a text that has changed since the chunks were cut; empty if there is none.

        Raises UserError if a text is missing.
        """
        changed = (path for path, part in opened if not _is_intact(path, part))
        return read_output(store, self.texts.output).find_damaged_url() or next(changed, "")


def digest_of_ranges(ranges: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of a group from its ranges."""
    return json_digest(
        [[part["sha256"], part["last"], *([part["separator"]] if part.get("separator") else [])] for part in ranges]
    )


def write_groups(directory: Path, chunks: Iterable[list[Range]], bytes_before: int) -> list[int]:
    """Write ``chunks.jsonl`` with the ranges of one chunk per line, and ``groups.json`` with the groups of chunks.

    A group ends when it has a 64th of the text before it, which includes ``bytes_before`` bytes, or 1 GiB. So some
    hundreds of groups hold a text, and appended text changes the last group only. Returns the sizes of the chunks.
    """
    groups: list[dict[str, Any]] = []
    group: list[list[Range]] = []
    sizes: list[int] = []
    group_start = bytes_before  # in the text
    position = bytes_before
    with (directory / "chunks.jsonl").open("wb") as file:

        def end_group() -> None:
            start = file.tell()
            file.writelines(json.dumps([part.to_json() for part in ranges]).encode() + b"\n" for ranges in group)
            digest = digest_of_ranges(part.to_json() for ranges in group for part in ranges)
            groups.append({"chunks": len(group), "sha256": digest, "start": start, "end": file.tell()})
            group.clear()

        for chunk in chunks:
            group.append(chunk)
            sizes.append(sum(part.end - part.start for part in chunk))
            position += sizes[-1]
            if position - group_start >= min(_MAX_GROUP_BYTES, group_start // _MIN_GROUPS):
                end_group()
                group_start = position
        if group:
            end_group()
    (directory / "groups.json").write_text(json.dumps(groups), encoding="utf-8")
    return sizes


def read_groups(
    store: Store, chunks: Ref, texts: Sequence[TextGroup], cuts: Sequence[Ref], split: str
) -> list[ChunkGroup]:
    """Return the groups of chunks of ``train`` or ``valid``. ``cuts`` are the outputs of ``chunk-group``."""
    entries = read_output(store, chunks).json("chunk_groups.json")[split]
    try:
        return [ChunkGroup(texts[entry["part"]], cuts[entry["part"]], **entry["group"]) for entry in entries]
    except IndexError:
        raise UserError(f"Chunks {chunks.key[:12]} are of other texts. Refresh the chunk stage.") from None


def size_in_bytes(ranges: Ranges) -> int:
    """Return the length of the text in the ranges."""
    return sum(part.end - part.start for _, part in ranges)


def open_ranges(ranges: Ranges, stopping: Event) -> Iterator[tuple[Iterator[bytes], bool, str]]:
    """Yield (blocks of bytes, whether the text ends with them, the only special token if one is set) of each text in
    the ranges, one open at a time.

    The blocks raise UserError at the end of a range whose bytes have changed since it was cut, and Stopped once
    ``stopping`` is set.
    """
    for (path, _, separator), items in groupby(ranges, key=lambda item: (item[0], item[1].text, item[1].separator)):
        parts = [part for _, part in items]
        yield _read_checked(path, parts, stopping), parts[-1].last, separator


def _read_checked(path: str, parts: list[Range], stopping: Event) -> Iterator[bytes]:
    with open_raw(path, is_ranged=True) as file:
        for part in parts:
            digest = hashlib.sha256()
            for block in read_blocks(file, part.start, part.end):
                if stopping.is_set():
                    raise Stopped("The run is being stopped.")
                digest.update(block)
                yield block
            if digest.hexdigest() != part.sha256:
                raise UserError(f"{path} changed or was damaged while the pipeline ran. Run it again.")


def _is_intact(path: str, part: Range) -> bool:
    """Return whether a range has its digest. Raises UserError if its text cannot be opened."""
    digest = hashlib.sha256()
    try:
        with open_raw(path, is_ranged=True) as file:
            for block in read_blocks(file, part.start, part.end):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == part.sha256
