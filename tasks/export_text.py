"""Stage ``export``: write the text for other tools, a file for each group."""

import os
import shutil

from lm.curate.config import TextFormat
from tasks.runtime.inputs import OpenTextGroup
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.text_parts import text_parts


@stage("export-group", is_mapped=True)
def export_group(out: Attempt, group: OpenTextGroup, separator: str, file_format: TextFormat) -> None:
    """Write the documents of a group to ``text.jsonl.zst`` or ``text.parquet``."""
    from lm.curate.export_text import export_texts  # slow to import

    path = out.directory / f"text.{file_format}"
    with keep_unchanged(group.sources, out.run.store):
        documents, size = export_texts(text_parts(group), separator, file_format, path)
    out.figures = {"documents": documents, "bytes": size}


@stage("export")
def export(out: Attempt, train: list[Output], valid: list[Output], file_format: TextFormat) -> None:
    """Put the files into one directory: ``train-00000.jsonl.zst``, …, and ``valid-00000.jsonl.zst``, …"""
    for split, groups in (("train", train), ("valid", valid)):
        figures = [group.manifest["figures"] for group in groups]
        out.figures[split] = {name: sum(part[name] for part in figures) for name in ("documents", "bytes")}
        out.figures[split]["files"] = len(groups)
        for number, group in enumerate(groups):
            source, path = group.path(f"text.{file_format}"), out.directory / f"{split}-{number:05}.{file_format}"
            try:
                os.link(source, path)
            except OSError:  # on another file system, or on one without links
                shutil.copyfile(source, path)
