"""Stage ``ingest``: sources in, the training and the validation text out."""

import hashlib
import json
import logging
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from lm import ingest as algorithm
from lm.corpus import DataConfig, Source, expand, fingerprint, version
from lm.errors import Unreachable, UserError
from tasks import pages
from tasks.records import Remembered, read
from tasks.stage import Draft, stage
from tasks.store import Store

log = logging.getLogger(__name__)


# Only what goes wrong on a network may go right the next time: 2, 4 and 8 seconds later, and up to half as much again.
_RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": lambda task, run, state: isinstance(state.data, Unreachable),
}


@task(name="find-sources", task_run_name="find sources", cache_policy=NO_CACHE, persist_result=False, **_RETRIES)
def find_sources(data: DataConfig, store: Store) -> tuple[list[Source], list[Source]]:
    """The sources that the paths, globs and URLs for training and validation name, with their digests: remembered
    where size and mtime or etag are the same, else read. One that is gone is taken as it was last seen, and said."""
    train, valid = ([_find_source(url, store) for url in expand(patterns)] for patterns in (data.train, data.valid))
    return train, valid


def _find_source(url: str, store: Store) -> Source:
    place = ("sources", f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json")
    remembered = read(Remembered, store, *place)
    if remembered and remembered["source"]["url"] != url:
        remembered = None  # not what we wrote there
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


@stage("ingest", page=pages.ingest, **_RETRIES)
def ingest(out: Draft, train: list[Source], valid: list[Source], data: DataConfig) -> None:
    """Write or refer to the texts; ``texts.json`` lists them."""
    out.sources = [*train, *valid]
    texts = algorithm.ingest(train, valid, data, out.directory)
    out.figures = {
        split: {name: number for name, number in tally.items() if name != "lengths"}
        for split, tally in texts["statistics"].items()
    }
    (out.directory / "texts.json").write_text(json.dumps(texts, indent=1), encoding="utf-8")
