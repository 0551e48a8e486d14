"""Digests of input files, kept below the root: a file is read again only if its version has changed."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from lm.common.errors import UserError
from lm.files.retry import retry_reading
from lm.files.urls import file_version
from lm.hardware.cpu import available_cpus
from lm.text.sources import Source, check_unchanged, check_version, expand_urls, hash_source
from tasks.runtime.schemas import SourceRecord, read_record
from tasks.runtime.store import Store

log = logging.getLogger(__name__)


def describe_sources(patterns: Sequence[str], store: Store) -> list[Source]:
    """Return the sources that paths, globs and URLs name, with their digests.

    A source is read only if its version has changed since the last run. If a source is gone, the digest of the last run
    is used, with a warning. Network failures are retried after 2, 4 and 8 seconds.
    """
    urls = retry_reading(expand_urls, patterns)
    for url in urls:
        if any("\ud800" <= character <= "\udfff" for character in url):  # as Python reads other bytes
            raise UserError(f"The name of the file {os.fsencode(url)!r} is not UTF-8; rename it.")
    return store.map(lambda url: retry_reading(_describe, url, store), urls, available_cpus())


@contextmanager
def keep_unchanged(sources: Sequence[Source], store: Store) -> Iterator[None]:
    """Raise UserError if a source is not what was described, or changes inside the ``with``.

    A source is read only if its version is not the one that was recorded, or if it has none.
    """

    def check(source: Source) -> tuple[int, str] | None:
        if version := file_version(source.url):
            check_unchanged(source, _describe(source.url, store).sha256)
        return version

    versions = store.map(lambda source: retry_reading(check, source), sources)
    yield
    store.map(lambda pair: retry_reading(check_version, *pair), [*zip(sources, versions, strict=True)])


def _describe(url: str, store: Store) -> Source:
    path = ("sources", f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json")
    record = read_record(SourceRecord, store, *path)
    if record and record["source"]["url"] != url:
        record = None  # not written by this function
    current_version = file_version(url)
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
