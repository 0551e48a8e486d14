"""Input of the stages that read text: the texts of ingest, and their chunks in groups."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count, groupby, islice, repeat
from pathlib import Path
from threading import Event
from typing import Any

from lm.common.errors import Stopped, UserError
from lm.text.chunks import Range
from lm.text.sources import open_raw, read_blocks
from tasks.runtime.output import Output, Ref, json_digest, read_output
from tasks.runtime.schemas import parse_chunks
from tasks.runtime.store import Store

_GROUPS_PER_SIZE = 64
_MAX_GROUP_BYTES = 1 << 30  # of text

Ranges = list[tuple[str, Range]]  # each range with the path or URL of its text


@dataclass(frozen=True)
class ChunkGroup:
    """Consecutive chunks, the input of a mapped stage: an entry of ``groups.json``. The body receives the ranges."""

    texts: Ref
    cut: Ref
    split: str
    chunks: int
    sha256: str
    """Digest of the bytes of each range and whether its text ends there: what decides the tokens."""
    start: int
    end: int
    """The lines of the chunks are the bytes ``start`` to ``end`` of ``chunks.jsonl``."""

    @property
    def identity(self) -> str:
        """The part of the group that enters a key."""
        return self.sha256

    def open(self, store: Store) -> Ranges:
        """Read the ranges."""
        ranges = parse_chunks(read_output(store, self.cut).read_range("chunks.jsonl", self.start, self.end))
        if digest_of_ranges(ranges) != self.sha256:
            raise UserError(f"{store.path(*self.cut)} is damaged. Run the pipeline again: it makes it again.")
        paths = text_urls(read_output(store, self.texts), self.split)
        try:
            return [(paths[part["text"]], Range(**part)) for part in ranges]
        except IndexError:
            raise UserError(f"Chunks {self.cut.key[:12]} are of other texts. Refresh the chunk stage.") from None


def group_sizes() -> Iterator[int]:
    """Yield the number of chunks of each group: 1 in the first 64 groups, 2 in the next 64, then 4, and so on.

    A group has at most a 64th of the chunks before it, and appended text changes the last group only.
    """
    for level in count():
        yield from repeat(1 << level, _GROUPS_PER_SIZE)


def digest_of_ranges(ranges: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of a group from its ranges."""
    return json_digest([[part["sha256"], part["last"]] for part in ranges])


def text_urls(texts: Output, split: str) -> list[str]:
    """Return the paths or URLs of the texts of ``train`` or ``valid``, to read ranges that have checksums."""
    sources = texts.manifest["sources"]
    try:
        return [
            sources[text["source"]]["url"] if text["file"] is None else texts.file_url(text["file"])
            for text in texts.json("texts.json")[split]
        ]
    except (IndexError, TypeError):
        raise UserError(f"{texts.url} refers to a source that it does not list. Refresh the ingest stage.") from None


def text_ranges(texts: Output, split: str) -> list[list[tuple[int, int]]]:
    """Return the byte ranges (start, end) of each of these files that are its text."""
    return [text["ranges"] for text in texts.json("texts.json")[split]]


def write_groups(directory: Path, chunks: Mapping[str, Iterable[list[Range]]]) -> dict[str, int]:
    """Write ``chunks.jsonl`` with the ranges of one chunk per line, and ``groups.json`` with the groups of each split.

    Returns the number of chunks of each split. A run whose groups are all cached reads only ``groups.json``.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    with (directory / "chunks.jsonl").open("wb") as file:
        for split, split_chunks in chunks.items():
            remaining, groups[split] = iter(split_chunks), []
            for size in group_sizes():
                if not (group := list(_take_group(remaining, size))):
                    break
                start = file.tell()
                file.writelines(json.dumps([asdict(part) for part in ranges]).encode() + b"\n" for ranges in group)
                digest = digest_of_ranges(asdict(part) for ranges in group for part in ranges)
                groups[split].append({"chunks": len(group), "sha256": digest, "start": start, "end": file.tell()})
    (directory / "groups.json").write_text(json.dumps(groups), encoding="utf-8")
    return {split: sum(group["chunks"] for group in split_groups) for split, split_groups in groups.items()}


def _take_group(chunks: Iterator[list[Range]], size: int) -> Iterator[list[Range]]:
    """Yield the chunks of a group: ``size`` chunks, or fewer that have :data:`_MAX_GROUP_BYTES`."""
    total = 0
    for chunk in islice(chunks, size):
        yield chunk
        total += sum(part.end - part.start for part in chunk)
        if total >= _MAX_GROUP_BYTES:
            return


def read_groups(store: Store, texts: Ref, cut: Ref, split: str) -> list[ChunkGroup]:
    """Return the groups of ``train`` or ``valid``, the input of a mapped stage."""
    groups = read_output(store, cut).json("groups.json")[split]
    return [ChunkGroup(texts, cut, split, **group) for group in groups]


def size_in_bytes(ranges: Ranges) -> int:
    """Return the length of the text in the ranges."""
    return sum(part.end - part.start for _, part in ranges)


def open_ranges(ranges: Ranges, stopping: Event) -> Iterator[tuple[Iterator[bytes], bool]]:
    """Yield (blocks of bytes, whether the text ends with them) of each text in the ranges, one open at a time.

    The blocks raise UserError at the end of a range whose bytes have changed since it was cut, and Stopped once
    ``stopping`` is set.
    """
    for (path, _), items in groupby(ranges, key=lambda item: (item[0], item[1].text)):
        parts = [part for _, part in items]
        yield _read_checked(path, parts, stopping), parts[-1].last


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
                raise UserError(f"{path} changed while the pipeline ran. Run it again.")
