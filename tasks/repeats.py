"""Stage ``repeats``: remove lines or paragraphs that occur more than once from the training text.

Each group of texts is digested alone, so that a new source digests only itself. ``repeats`` compares all of them. Only
groups that lose something are written again.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages import repeats as pages
from tasks.runtime.inputs import OpenTextGroup
from tasks.runtime.losses import write_losses
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.text_parts import text_parts

if TYPE_CHECKING:
    from lm.curate.config import Unit


@stage("repeats-digest", is_mapped=True)
def digest_group(out: Attempt, group: OpenTextGroup, separator: str, unit: "Unit") -> None:
    """Write sorted files of the digests of a group's lines or paragraphs."""
    from lm.curate.repeated_text import digest_repeats  # slow to import

    with keep_unchanged(group.sources, out.run.store):
        count = digest_repeats(text_parts(group), separator, unit, out.directory)
    out.write_json("count.json", count)


@stage("repeats-find")
def find_repeats(out: Attempt, digests: list[Output], unit: "Unit") -> None:
    """Write a bit for each line or paragraph of each group that has repeated ones, see
    :func:`lm.curate.duplicate_lines.find_repeated_lines`."""
    from lm.curate.duplicate_lines import find_repeated_lines  # slow to import

    names = [sorted(file["path"] for file in output.manifest["files"]) for output in digests]
    runs = [
        output.path(name)
        for output, paths in zip(digests, names, strict=True)
        for name in paths
        if name.endswith(f".{unit}s")
    ]
    ends = np.cumsum([output.json("count.json") for output in digests]).tolist()
    bits = np.unpackbits(find_repeated_lines(runs, unit), count=ends[-1] if ends else 0)
    parts = np.split(bits, ends[:-1])
    write_losses(out, [np.packbits(part) if part.any() else part[:0] for part in parts])


@stage("repeats-drop", is_mapped=True)
def drop_repeats(out: Attempt, group: tuple[OpenTextGroup, Any], separator: str, unit: "Unit") -> None:
    """Write the text of a group without repeated lines or paragraphs, and ``texts.json``, as ``ingest-group`` does;
    besides, as records, ``changed.parquet`` with a row for each changed document, and ``repeated_samples.json``."""
    from lm.curate.repeated_text import CHANGED, write_without_repeats  # slow to import

    opened, repeated = group
    with keep_unchanged(opened.sources, out.run.store):
        parts = text_parts(opened)
        result = write_without_repeats(parts, separator, repeated, unit, out.directory)
    out.write_json("texts.json", result.texts.to_json())
    out.write_json("repeated_samples.json", [sample._asdict() for sample in result.samples])
    out.records = [CHANGED, "repeated_samples.json"]
    out.figures = {**asdict(result.figures), "sources": [*dict.fromkeys(part.source for part in parts)]}


@stage("repeats", page=pages.repeats_page)
def repeats(out: Attempt, before: Output, changed: list[Output], separator: str, unit: "Unit") -> None:
    """Write ``text_groups.json`` with the statistics of the text. ``before``: the output that has those of the text as
    it was; ``changed``: the groups that were written again."""
    statistics = before.json("text_groups.json")["statistics"]
    figures = [output.manifest["figures"] for output in changed]
    removed = sum(part["removed"] for part in figures)
    lost = {name: sum(part["changed"][name] for part in figures) for name in ("documents", "bytes")}
    statistics["train"]["documents"] -= removed
    statistics["train"]["bytes"] -= lost["bytes"] + removed * len(separator.encode())
    out.write_json("text_groups.json", {"train": [], "valid": [], "statistics": statistics})
    out.figures = {
        "changed": lost,
        f"{unit}s": sum(part["repeated"] for part in figures),
        "removed documents": removed,
    }
