"""Stage ``ingest``: read groups of sources, then choose the training and validation text."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from lm.files.retry import retry_reading
from lm.text.config import DataConfig
from lm.text.document_metadata import METADATA
from lm.text.held_out import combine_groups, join_held_out
from lm.text.ingest import HELD_OUT, Text, read_group
from lm.text.sources import Source, warn_about_equal_texts, warn_about_repeated_sources
from lm.text.web_pages import is_web_format, page_reader_versions
from tasks.pages import text as pages
from tasks.runtime.inputs import read_texts, text_sources, text_url
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import describe_sources, keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.store import Store

log = logging.getLogger(__name__)


def find_sources(data: DataConfig, store: Store) -> tuple[list[Source], list[Source]]:
    """Return the sources for training and for validation; see :func:`describe_sources`. Warns if some are equal."""
    named = find_named_sources(data, store)
    train = [source for sources in named.values() for source in sources] or describe_sources(data.train, store)
    valid = describe_sources(data.valid, store)
    warn_about_repeated_sources(train, valid)
    return train, valid


def find_named_sources(data: DataConfig, store: Store) -> dict[str, list[Source]]:
    """Return the files of each source of ``data.mix``, by its name."""
    return {name: describe_sources(source.paths, store) for name, source in data.named_sources.items()}


def page_reader_identity(data: DataConfig, sources: Sequence[Source]) -> list[str]:
    """Return what decides the text of web pages besides the pages; empty if no source has pages. Only then are there
    such arguments, and parts of the keys. Raises UserError if the libraries are missing."""
    return [data.page_text, *page_reader_versions()] if any(is_web_format(source.url) for source in sources) else []


@stage("ingest-group", is_mapped=True)
def ingest_group(
    out: Attempt,
    group: list[Source],
    fraction: float,
    data: DataConfig,
    special_tokens: Sequence[str] = (),
    page_reader: Sequence[str] = (),
) -> None:
    """Write the texts of a group of sources, or refer to the sources; ``texts.json`` lists them.

    ``special_tokens``: those whose text is ordinary in documents of JSON Lines, Parquet and web pages. ``page_reader``:
    what else decides the text of web pages, for the key; see :func:`page_reader_identity`.
    """
    out.sources = group
    arguments = group, data, fraction, out.directory, special_tokens
    texts = retry_reading(read_group, *arguments)  # a retry overwrites the first try
    out.write_json("texts.json", texts.to_json())
    out.figures = {"digests": texts.digests}
    if skipped := texts.skipped_pages:
        out.figures["pages"] = skipped
        if skipped["damaged"]:
            names = "; ".join(skipped["names"][:3])
            log.warning("Skipped %s damaged web pages and records: %s.", f"{skipped['damaged']:,}", names)


@stage("ingest", page=pages.ingest)
def ingest(out: Attempt, train: list[Output], valid: list[Output], fraction: float, data: DataConfig) -> None:
    """Choose the training and the validation text; ``text_groups.json`` lists the parts of both."""
    outputs = [*train, *valid]
    warn_about_equal_texts(_read_digests(train), _read_digests(valid))
    groups = out.run.store.map(read_texts, outputs)
    with ExitStack() as read:

        def url_of(number: int, text: Text) -> str:
            """Return the place of a text that is read again."""
            read.enter_context(keep_unchanged(text_sources(outputs[number], text), out.run.store))
            return text_url(outputs[number], text)

        splits = combine_groups(groups[: len(train)], groups[len(train) :], data, fraction, url_of)
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
        metadata = [
            output.path(METADATA) if any(file["path"] == METADATA for file in output.manifest["files"]) else None
            for output in held_out
        ]
        held_out_groups = [group for group in groups if group.held_out_bytes]
        texts = join_held_out(held_out_groups, paths, out.directory / "valid.txt", metadata)
        out.write_json("texts.json", texts.to_json())
    content["statistics"] = {
        name: {**asdict(split.statistics), "bytes": sum(size for _, size in split.selections)}
        for name, split in splits.items()
    }
    out.write_json("text_groups.json", content)
    out.figures = {
        split: {name: number for name, number in statistics.items() if name != "lengths"}
        for split, statistics in content["statistics"].items()
    }


@stage("ingest", page=pages.ingest_mix)
def ingest_mix(out: Attempt, sources: list[Output], names: list[str], valid: list[Output]) -> None:
    """Add up the statistics of the sources of ``data.mix``, each an output of :func:`ingest`, and of ``valid``.

    The text groups stay in those outputs: a source that changes does not change the stages after another one.
    """
    contents = [output.json("text_groups.json")["statistics"] for output in (*sources, *valid)]
    for content in contents[len(sources) :]:  # validation text without a name was read as training text
        content["train"], content["valid"] = content["valid"], content["train"]
    statistics: dict[str, Any] = {}
    for split in ("train", "valid"):
        parts = [content[split] for content in contents]
        statistics[split] = {name: sum(part[name] for part in parts) for name in parts[0] if name != "lengths"}
        statistics[split]["lengths"] = np.sum([part["lengths"] for part in parts], axis=0).tolist()
    out.figures = {
        split: {name: number for name, number in total.items() if name != "lengths"}
        for split, total in statistics.items()
    }
    by_name = dict(zip(names, contents, strict=False))
    out.write_json("text_groups.json", {"train": [], "valid": [], "statistics": statistics, "sources": by_name})


def _read_digests(groups: list[Output]) -> list[tuple[Source, str | None]]:
    """Return the sources of groups, each with the digest of its documents if it is known."""
    return [
        (Source(**source), group.manifest["figures"].get("digests", {}).get(source["url"]))
        for group in groups
        for source in group.manifest["sources"]
    ]
