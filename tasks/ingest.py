"""Stage ``ingest``: write the training and validation texts from their sources."""

import hashlib
import json
import logging
from dataclasses import asdict

from lm.common.cpu import available_cpus
from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.sources import Source, expand_urls, hash_source, source_version
from tasks.pages import stages as pages
from tasks.runtime.context import Attempt
from tasks.runtime.schemas import SourceRecord, read_record
from tasks.runtime.stage import stage
from tasks.runtime.store import Store, retry_reading

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


@stage("ingest", page=pages.ingest)
def ingest(out: Attempt, train: list[Source], valid: list[Source], data: DataConfig) -> None:
    """Write the texts, or refer to their sources; ``texts.json`` lists them."""
    from lm.text.ingest import ingest_sources

    out.sources = [*train, *valid]
    texts = retry_reading(ingest_sources, train, valid, data, out.directory)  # a retry overwrites the first try
    out.figures = {
        split: {name: number for name, number in statistics.items() if name != "lengths"}
        for split, statistics in texts["statistics"].items()
    }
    (out.directory / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
