"""Texts of groups of sources, the input of the stage that cuts chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lm.common.errors import UserError
from lm.text.held_out import Selection
from lm.text.ingest import GroupTexts, Text
from lm.text.sources import ByteRanges, Source
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.store import Store


@dataclass(frozen=True)
class OpenTextGroup:
    """A :class:`TextGroup` as a stage receives it."""

    urls: list[str]
    """Path or URL of each text."""
    sources: list[Source]
    """Those of the texts that are sources, which stay in place."""
    ranges: list[ByteRanges]
    """The byte ranges of each text."""
    bytes_before: int
    rows: Sequence[ByteRanges] = field(default_factory=list)
    """The byte ranges of each text in which only the separator is a token."""
    separator: str = ""
    """The separator, if there are rows."""


@dataclass(frozen=True)
class TextGroup:
    """The part of a split that lies in one output: an entry of ``text_groups.json``."""

    output: Ref
    """Output of ``ingest-group``, or of ``ingest`` for the text held out."""
    digest: str
    """Its content digest."""
    selection: Selection
    bytes_before: int
    """Size of the split's text before this part."""

    @property
    def identity(self) -> list[Any]:
        """The part of the group that enters a key."""
        interval = self.selection.interval and list(self.selection.interval)
        return [self.digest, interval, self.bytes_before]

    def open(self, store: Store) -> OpenTextGroup:
        """Read the list of the texts. Raises UserError if a file of the group is damaged."""
        output = read_output(store, self.output)
        if url := output.find_damaged_url():
            raise UserError(f"{url} is damaged. Run the pipeline again: it makes it again.")
        group = read_texts(output)
        texts = self.selection.texts(group)
        urls = [text_url(output, text) for text, _ in texts]
        sources = [source for text, _ in texts for source in text_sources(output, text)]
        ranges, rows = [ranges for _, ranges in texts], [text.rows for text, _ in texts]
        return OpenTextGroup(urls, sources, ranges, self.bytes_before, rows, group.separator)

    def find_damaged_url(self, store: Store) -> str:
        """Return the path or URL of a damaged file of the output; empty if there is none."""
        return read_output(store, self.output).find_damaged_url()

    def urls(self, store: Store) -> list[str]:
        """Return the path or URL of each text."""
        output = read_output(store, self.output)
        return [text_url(output, text) for text, _ in self.selection.texts(read_texts(output))]


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


def read_text_groups(store: Store, texts: Ref, groups: Sequence[Ref], split: str) -> list[TextGroup]:
    """Return the text groups of ``train`` or ``valid``. ``groups`` are the outputs of all groups of sources."""
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
        result.append(TextGroup(output, digest, selection, bytes_before))
        bytes_before += entry["bytes"]
    return result
