"""Sources in, training and validation text out: what the ``ingest`` stage does."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm.corpus import DataConfig, Source, Tally, documents, is_referable
from lm.errors import UserError
from lm.pretokens import last_cut

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """One UTF-8 text: a file that ingest made, or the number of the source that is used where it lies; its bytes."""

    file: str | None
    source: int | None
    bytes: int


def ingest(train: Sequence[Source], valid: Sequence[Source], config: DataConfig, out: Path) -> dict[str, Any]:
    """Turn sources into texts. Returns what goes into ``texts.json``: ``train`` and ``valid``, lists of :class:`Text`
    as dicts, and ``statistics`` of each.

    Plain local files are referred to (``source`` counts train, then valid); everything else, and both texts when a
    fraction is set aside, is written to ``out`` as ``train.txt`` and ``valid.txt``. Raises UserError for bad input.
    """
    if not valid and config.valid_fraction:
        texts, statistics = _split(train, config, out)
    else:
        texts, statistics = {}, {}
        for name, sources, first in (("train", train, 0), ("valid", valid, len(train))):
            tally = Tally()
            texts[name] = list(_collect(name, sources, first, config, out, tally))
            statistics[name] = asdict(tally)
    for name, tally_dict in statistics.items():
        if tally_dict["documents"] == 1:
            log.info("The %s text has no separator %s inside: it is one document.", name, config.separator)
        for what in ("replaced", "separators_removed"):
            if tally_dict[what]:
                log.warning("The %s text: %s %s.", name, f"{tally_dict[what]:,}", what.replace("_", " "))
    if not sum(text.bytes for text in texts["train"]):
        raise UserError("The sources hold no text: data.train has no document.")
    return {
        **{name: [asdict(text) for text in found] for name, found in texts.items()},
        "statistics": {name: {**statistics[name], "bytes": sum(text.bytes for text in texts[name])} for name in texts},
    }


def _collect(
    name: str, sources: Sequence[Source], first: int, config: DataConfig, out: Path, tally: Tally
) -> Iterator[Text]:
    """The texts of sources that are not split: files used where they lie, runs of the others joined to one file."""
    copied: list[Source] = []
    parts = 0

    def flush() -> Iterator[Text]:
        nonlocal parts
        if copied:
            parts += 1
            path = out / (f"{name}.txt" if parts == 1 else f"{name}-{parts}.txt")
            yield from _written(path, _write(path, _all_documents(copied, config, tally)))
            copied.clear()

    for number, source in enumerate(sources, start=first):
        if is_referable(source.url) and (size := _check(source, config, tally)) is not None:
            yield from flush()
            yield Text(None, number, size)
        else:
            copied.append(source)
    yield from flush()


def _check(source: Source, config: DataConfig, tally: Tally) -> int | None:
    """Read a plain file through: its bytes, or None when it has invalid bytes to replace and so must be copied."""
    found = Tally()
    for _ in documents(source.url, config, found):
        pass
    if found.replaced:
        return None
    tally.documents += found.documents
    tally.lengths = [sum(counts) for counts in zip(tally.lengths, found.lengths, strict=True)]
    return source.bytes


def _all_documents(sources: Iterable[Source], config: DataConfig, tally: Tally) -> Iterator[str]:
    for source in sources:
        yield from documents(source.url, config, tally)


def _write(path: Path, texts: Iterable[str]) -> int:
    size = 0
    with path.open("wb") as file:
        for text in texts:
            size += file.write(text.encode())
    return size


def _written(path: Path, size: int) -> list[Text]:
    if not size:
        path.unlink()
        return []
    return [Text(path.name, None, size)]


def _split(
    sources: Sequence[Source], config: DataConfig, out: Path
) -> tuple[dict[str, list[Text]], dict[str, dict[str, Any]]]:
    """Set a fraction of the documents aside, each by its own hash: the choice does not depend on order or number."""
    tallies = {"train": Tally(), "valid": Tally()}
    tally = Tally()
    limit = int(config.valid_fraction * 2**64)
    paths = {name: out / f"{name}.txt" for name in tallies}
    sizes = dict.fromkeys(tallies, 0)
    with paths["train"].open("wb") as train, paths["valid"].open("wb") as valid:
        for document in _all_documents(sources, config, tally):
            data = document.encode()
            # Stripped, as the first document of a file lacks the newline that comes before the others.
            words = document.removesuffix(config.separator).strip()
            digest = hashlib.sha256(words.encode()).digest()
            chosen = int.from_bytes(digest[:8], "big") < limit and not document.isspace()
            name = "valid" if chosen else "train"
            if not document.isspace():
                tallies[name].add(words)
            sizes[name] += (valid if chosen else train).write(data)
    tallies["train"].replaced, tallies["train"].separators_removed = tally.replaced, tally.separators_removed
    if not tallies["train"].documents or not tallies["valid"].documents:
        log.info(
            "Too few documents (%d) to set a fraction aside: the last %g %% of the text are the validation text.",
            tally.documents,
            100 * config.valid_fraction,
        )
        # One of the two is empty, or is white space that stood after the last separator.
        sizes = _split_tail(paths["valid"].read_bytes() + paths["train"].read_bytes(), config, paths)
        tallies["train"].documents, tallies["train"].lengths = tally.documents, tally.lengths
        tallies["valid"] = Tally()
        tallies["valid"].add(paths["valid"].read_text(encoding="utf-8"))
    texts = {name: _written(paths[name], sizes[name]) for name in paths}
    return texts, {name: asdict(found) for name, found in tallies.items()}


def _split_tail(data: bytes, config: DataConfig, paths: dict[str, Path]) -> dict[str, int]:
    wanted = data[: int(len(data) * (1 - config.valid_fraction))].decode(errors="ignore")
    cut = len(wanted[: last_cut(wanted, [config.separator])].encode())
    if not cut:
        raise UserError("The text is too short to set a validation fraction aside; set data.valid_fraction to 0.")
    end = b"" if data[:cut].endswith(config.separator.encode()) else config.separator.encode()
    return {"train": paths["train"].write_bytes(data[:cut] + end), "valid": paths["valid"].write_bytes(data[cut:])}
