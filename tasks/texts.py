"""What the stages on text share: the texts that ingest made or refers to, and the chunks that they are cut into."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any

from lm.chunks import Range
from lm.corpus import open_range
from lm.errors import UserError
from tasks.output import Output, Ref, read_output
from tasks.stage import Stopped
from tasks.store import Store


@dataclass(frozen=True)
class Chunk:
    """A chunk as the mapped stages take it: byte ranges of files. Its identity is the bytes, wherever they lie."""

    split: str
    number: int
    total: int
    ranges: list[tuple[str, Range]]

    def __str__(self) -> str:
        name = "chunk" if self.split == "train" else f"{self.split} chunk"
        return f"{name} {self.number}/{self.total}"

    @property
    def identity(self) -> Any:
        """What decides the tokens: the bytes of each range, and whether its file ends with it."""
        return [[part.sha256, part.last] for _, part in self.ranges]

    @property
    def bytes(self) -> int:
        """Length in bytes."""
        return sum(part.end - part.start for _, part in self.ranges)


def text_paths(texts: Output, split: str) -> list[str]:
    """Local paths of the texts of ``train`` or ``valid``."""
    sources, found = texts.manifest["sources"], texts.json("texts.json")[split]
    try:
        return [
            sources[text["source"]]["url"] if text["file"] is None else str(texts.path(text["file"])) for text in found
        ]
    except (IndexError, TypeError):
        raise UserError(f"{texts.url} refers to sources that it does not name; refresh the ingest stage.") from None


def read_chunks(store: Store, texts: Ref, chunks: Ref, split: str) -> list[Chunk]:
    """The chunks of ``train`` or ``valid``, ready to map over."""
    paths = text_paths(read_output(store, texts), split)
    found = read_output(store, chunks).json("chunks.json")[split]
    try:
        return [
            Chunk(split, number, len(found), [(paths[part["text"]], Range(**part)) for part in ranges])
            for number, ranges in enumerate(found, start=1)
        ]
    except IndexError:
        raise UserError(f"Chunks {chunks.key[:12]} are of other texts than these; refresh the chunk stage.") from None


def open_ranges(chunk: Chunk, stopping: Event) -> Iterator[tuple[Iterator[bytes], bool]]:
    """The ranges of a chunk, one open at a time: (bytes in blocks, whether its file ends with it).

    Raises UserError at the end of a range whose bytes are not those that were cut, and Stopped once ``stopping`` is
    set: a thread cannot be ended from outside.
    """
    for path, part in chunk.ranges:
        digest = hashlib.sha256()
        with open_range(path, part.start, part.end) as blocks:
            yield _digested(blocks, digest, stopping), part.last
        if digest.hexdigest() != part.sha256:
            raise UserError(f"{path} changed while the pipeline ran; run it again.")


def _digested(blocks: Iterator[bytes], digest: Any, stopping: Event) -> Iterator[bytes]:
    for block in blocks:
        if stopping.is_set():
            raise Stopped("The run is being stopped.")
        digest.update(block)
        yield block
