"""Stage ``ingest``: read groups of sources, then choose the training and validation text."""

import hashlib
import json
import logging
from dataclasses import asdict
from typing import Any

from lm.common.cpu import available_cpus
from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.ingest import HELD_OUT, GroupTexts, combine_groups, join_files, read_group
from lm.text.sources import Source, expand_urls, hash_source, source_version
from tasks.pages import stages as pages
from tasks.runtime.context import Attempt
from tasks.runtime.output import Output
from tasks.runtime.schemas import SourceRecord, read_record
from tasks.runtime.stage import stage
from tasks.runtime.store import Store, retry_reading
from tasks.runtime.text_groups import read_texts, text_url

log = logging.getLogger(__name__)


def find_sources(data: DataConfig, store: Store) -> tuple[list[Source], list[Source]]:
    """Return the sources for training and for validation, with their digests.

    A source is read only if its version has changed since the last run. If a source is gone, the digest of the last run
    is used, with a warning. Network failures are retried after 2, 4 and 8 seconds.
    """

    def find(patterns: list[str]) -> list[Source]:
        urls = retry_reading(expand_urls, patterns)
        return store.map(lambda url: retry_reading(_find_source, url, store), urls, available_cpus())

    return find(data.train), find(data.valid)


def _find_source(url: str, store: Store) -> Source:
    path = ("sources", f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json")
    record = read_record(SourceRecord, store, *path)
    if record and record["source"]["url"] != url:
        record = None  # not written by this function
    current_version = source_version(url)
    if record and current_version and record["version"] == list(current_version):
        return Source(**record["source"])
    try:
        source = hash_source(url)
    except UserError as error:
        if not record or current_version:
            raise
        log.warning("%s The outputs made from it are used.", error)
        return Source(**record["source"])
    store.write_json({"source": asdict(source), "version": current_version}, *path)
    return source


@stage("ingest-group", is_mapped=True)
def ingest_group(out: Attempt, group: list[Source], fraction: float, data: DataConfig) -> None:
    """Write the texts of a group of sources, or refer to the sources; ``texts.json`` lists them."""
    out.sources = group
    texts = retry_reading(read_group, group, data, fraction, out.directory)  # a retry overwrites the first try
    (out.directory / "texts.json").write_text(json.dumps(asdict(texts)), encoding="utf-8")


@stage("ingest", page=pages.ingest)
def ingest(out: Attempt, train: list[Output], valid: list[Output], fraction: float, data: DataConfig) -> None:
    """Choose the training and the validation text; ``text_groups.json`` lists the parts of both."""
    outputs = [*train, *valid]
    groups = out.run.store.map(read_texts, outputs)
    splits = combine_groups(
        groups[: len(train)],
        groups[len(train) :],
        data,
        fraction,
        lambda number, text: text_url(outputs[number], text),
    )
    content: dict[str, Any] = {
        name: [
            {
                "group": selection.group,
                "interval": selection.interval,
                "bytes": size,
                "digest": "" if selection.group is None else outputs[selection.group].digest,
            }
            for selection, size in split.selections
        ]
        for name, split in splits.items()
    }
    if any(entry["group"] is None for entry in content["valid"]):
        held_out = [output for output, group in zip(outputs, groups, strict=True) if group.held_out_bytes]
        paths = out.run.store.map(lambda output: output.path(HELD_OUT), held_out)
        texts = GroupTexts([join_files(paths, out.directory / "valid.txt")])
        (out.directory / "texts.json").write_text(json.dumps(asdict(texts)), encoding="utf-8")
    content["statistics"] = {
        name: {**asdict(split.statistics), "bytes": sum(size for _, size in split.selections)}
        for name, split in splits.items()
    }
    (out.directory / "text_groups.json").write_text(json.dumps(content), encoding="utf-8")
    out.figures = {
        split: {name: number for name, number in statistics.items() if name != "lengths"}
        for split, statistics in content["statistics"].items()
    }
