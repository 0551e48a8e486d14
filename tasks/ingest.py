"""Stage ``ingest``: sources in, the training and the validation text out."""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict

from lm import ingest as algorithm
from lm.corpus import DataConfig, Source, expand, fingerprint, version
from lm.errors import UserError
from tasks.stage import Draft, stage
from tasks.store import Store

log = logging.getLogger(__name__)


def find_sources(patterns: Iterable[str], store: Store) -> list[Source]:
    """The sources that paths, globs and URLs name, with their digests: remembered where size and mtime or etag are the
    same, else read. One that is gone is taken as it was last seen, and said."""
    return [_find_source(url, store) for url in expand(patterns)]


def _find_source(url: str, store: Store) -> Source:
    place = ("sources", f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json")
    remembered = store.read_json(*place)
    now = version(url)
    if remembered and now and remembered["version"] == list(now):
        return Source(**remembered["source"])
    try:
        source = fingerprint(url)
    except UserError as error:
        if not remembered or now:
            raise
        log.warning("%s What was made from it is used.", error)
        return Source(**remembered["source"])
    store.write_json({"source": asdict(source), "version": now}, *place)
    return source


@stage("ingest")
def ingest(out: Draft, train: list[Source], valid: list[Source], data: DataConfig) -> None:
    """Write or refer to the texts; ``texts.json`` lists them."""
    out.sources = [*train, *valid]
    texts = algorithm.ingest(train, valid, data, out.directory)
    out.figures = texts["statistics"]
    (out.directory / "texts.json").write_text(json.dumps(texts, indent=1), encoding="utf-8")
