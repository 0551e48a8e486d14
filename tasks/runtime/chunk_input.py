"""Chunks in groups: the input of the stages that count and encode text."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Event
from typing import Any

from lm.common.errors import Stopped, UserError
from lm.files.compression import read_blocks
from lm.text.chunks import Range
from lm.text.sources import open_raw
from tasks.runtime.output import Ref, json_digest, read_output
from tasks.runtime.schemas import parse_chunks
from tasks.runtime.store import Store
from tasks.runtime.text_groups import TextGroup

_MIN_GROUPS = 64
_MAX_GROUP_BYTES = 1 << 30  # of text

Ranges = list[tuple[str, Range]]  # each range with the path or URL of its text


@dataclass(frozen=True)
class ChunkGroup:
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

    @property
    def identity(self) -> str:
        """The part of the group that enters a key."""
        return self.sha256

    def open(self, store: Store) -> Ranges:
        """Read the ranges. Raises UserError if they are damaged."""
        output = read_output(store, self.cut)
        ranges = parse_chunks(output.read_range("chunks.jsonl", self.start, self.end))
        if ranges is None or digest_of_ranges(ranges) != self.sha256:
            raise UserError(f"{output.file_url('chunks.jsonl')} is damaged. Run the pipeline again: it makes it again.")
        urls = self.texts.urls(store)
        try:
            return [(urls[part["text"]], Range(**part)) for part in ranges]
        except IndexError:
            raise UserError(f"Chunks {self.cut.key[:12]} are of other texts. Refresh the chunk stage.") from None

    def find_damaged_url(self, store: Store) -> str:
        """Return the path or URL of a text that has changed since the chunks were cut; empty if there is none.

        Raises UserError if a text is missing.
        """
        changed = (path for path, part in self.open(store) if not _is_intact(path, part))
        return self.texts.find_damaged_url(store) or next(changed, "")


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
