"""The texts of a group as the stages of curation read them."""

from typing import TYPE_CHECKING

from lm.text.document_metadata import METADATA, read_metadata
from tasks.runtime.inputs import OpenTextGroup

if TYPE_CHECKING:
    from lm.curate.text_parts import TextPart


def text_parts(group: OpenTextGroup) -> "list[TextPart]":
    """Return the texts of a group with their names."""
    from lm.curate.text_parts import TextPart  # slow to import

    has_metadata = any(file["path"] == METADATA for file in group.output.manifest["files"])
    parts = []
    for url, name, (text, ranges) in zip(group.urls, _name_texts(group), group.texts, strict=True):
        table = None
        if has_metadata and text.file is not None:
            table = read_metadata(group.output.path(METADATA), text.file, ranges)
        parts.append(TextPart(url, ranges, text.rows, name, table))
    return parts


def _name_texts(group: OpenTextGroup) -> list[str]:
    """Return what to call each text of a group: its source, or the sources that it was copied from.

    A stage that writes text again keeps the names in its figure ``sources``.
    """
    sources = [source["url"] for source in group.output.manifest["sources"]]
    in_place = {text.source for text, _ in group.texts if text.file is None}
    copied = [url for number, url in enumerate(sources) if number not in in_place]
    copied += group.output.manifest["figures"].get("sources", [])
    copy = f"{copied[0]} and {len(copied) - 1} more" if len(copied) > 1 else "".join(copied) or "held-out documents"
    return [copy if text.file is not None else sources[text.source or 0] for text, _ in group.texts]
