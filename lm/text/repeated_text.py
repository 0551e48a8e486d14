"""Warnings about text that is read more than once."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from lm.text.sources import Source

log = logging.getLogger(__name__)

_MAX_SOURCES_NAMED = 6  # in a warning


def warn_about_repeated_sources(train: Sequence[Source], valid: Sequence[Source]) -> None:
    """Log a warning if sources have the same bytes: within the training or the validation text, or in both."""
    for name, sources in (("training", train), ("validation", valid)):
        copies = Counter(source.sha256 for source in sources)
        if repeated := [source.url for source in sources if copies[source.sha256] > 1]:
            log.warning("The %s text holds the same source more than once: %s.", name, list_some(repeated))
    train_digests = {source.sha256 for source in train}
    if shared := [source.url for source in valid if source.sha256 in train_digests]:
        log.warning("Validation text is also training text, so its loss will be too low: %s.", list_some(shared))


def warn_about_equal_texts(
    train: Sequence[tuple[Source, str | None]], valid: Sequence[tuple[Source, str | None]]
) -> None:
    """Log a warning if sources of different bytes hold the same documents, such as a file and its compressed copy.

    Each source has the digest of its documents, or None if it is not known. :func:`warn_about_repeated_sources` warns
    about sources of the same bytes.
    """
    for name, sources in (("training", train), ("validation", valid)):
        stored: dict[str | None, dict[str, str]] = {}  # by the digest of the documents: stored digest → first URL
        for source, digest in sources:
            stored.setdefault(digest, {}).setdefault(source.sha256, source.url)
        for digest, urls in stored.items():
            if digest and len(urls) > 1:
                log.warning("The %s text holds the same documents more than once: %s.", name, list_some(urls.values()))
    known = {digest: source.sha256 for source, digest in train if digest}
    if shared := [source.url for source, digest in valid if known.get(digest or "", source.sha256) != source.sha256]:
        log.warning("Validation text is also training text, so its loss will be too low: %s.", list_some(shared))


def list_some(urls: Iterable[str]) -> str:
    """Return the first of the URLs, each once, and the number of others."""
    names = [*dict.fromkeys(urls)]
    others = len(names) - _MAX_SOURCES_NAMED
    return ", ".join(names[:_MAX_SOURCES_NAMED]) + (f" and {others:,} more" if others > 0 else "")
