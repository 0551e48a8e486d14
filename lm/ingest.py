"""Sources in, training and validation text out: what the ``ingest`` stage does."""

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

from lm.corpus import DataConfig, Source, Tally, decode_blocks, is_referable, open_range, pieces
from lm.errors import UserError
from lm.pretokens import cut_safely, last_cut

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
        texts, tallies = _split(train, config, out)
    else:
        texts, tallies = {}, {"train": Tally(), "valid": Tally()}
        for name, sources, first in (("train", train, 0), ("valid", valid, len(train))):
            texts[name] = list(_collect(name, sources, first, config, out, tallies[name]))
    for name, tally in tallies.items():
        if tally.documents == 1:
            log.info("The %s text has no separator %s inside: it is one document.", name, config.separator)
        for what, number in (("replaced", tally.replaced), ("separators removed", tally.separators_removed)):
            if number:
                log.warning("The %s text: %s %s.", name, f"{number:,}", what)
    if not sum(text.bytes for text in texts["train"]):
        raise UserError("The sources hold no text: data.train has no document.")
    return {
        **{name: [asdict(text) for text in found] for name, found in texts.items()},
        "statistics": {
            name: {**asdict(tally), "bytes": sum(text.bytes for text in texts[name])} for name, tally in tallies.items()
        },
    }


def _collect(
    name: str, sources: Sequence[Source], first: int, config: DataConfig, out: Path, tally: Tally
) -> Iterator[Text]:
    """The texts of sources that are not split: files used where they lie, runs of the others joined to one file."""
    checked = ((source, _check(source, number, config, tally)) for number, source in enumerate(sources, start=first))
    parts = count(1)
    for is_copied, run in groupby(checked, key=lambda found: found[1] is None):
        if not is_copied:
            yield from (text for _, text in run if text)
            continue
        part = next(parts)
        path = out / (f"{name}.txt" if part == 1 else f"{name}-{part}.txt")
        with path.open("wb") as file:
            for source, _ in run:
                file.writelines(piece.encode() for piece in pieces(source.url, config, tally))
        yield from _written(path)


def _check(source: Source, number: int, config: DataConfig, tally: Tally) -> Text | None:
    """A plain file, read through, as the text that it is; None for one that must be copied, if only for its invalid
    bytes to be replaced."""
    if not is_referable(source.url):
        return None
    found = Tally()
    for _ in pieces(source.url, config, found):
        pass
    if found.replaced:
        return None
    tally.documents += found.documents
    tally.lengths = [sum(counts) for counts in zip(tally.lengths, found.lengths, strict=True)]
    return Text(None, number, source.bytes)


def _written(path: Path) -> list[Text]:
    """The text of a file of ours; an empty one is removed."""
    if size := path.stat().st_size:
        return [Text(path.name, None, size)]
    path.unlink()
    return []


class _Words:
    """The text of a document without the white space around it, taken in piece by piece."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.length = 0
        self._space: list[str] = []  # which is around it, or inside where more follows

    def add(self, piece: str) -> None:
        text = piece if self.length else piece.lstrip()
        if words := text.rstrip():
            for part in (*self._space, words):
                self.digest.update(part.encode())
                self.length += len(part)
            self._space.clear()
        if self.length:
            self._space.append(text[len(words) :])


def _split(sources: Sequence[Source], config: DataConfig, out: Path) -> tuple[dict[str, list[Text]], dict[str, Tally]]:
    """Set a fraction of the documents aside, each by its own hash: the choice does not depend on order or number."""
    tallies = {"train": Tally(), "valid": Tally()}
    tally = Tally()
    limit = int(config.valid_fraction * 2**64)
    paths = {name: out / f"{name}.txt" for name in tallies}
    with paths["train"].open("w+b") as train, paths["valid"].open("wb") as valid:
        for source in sources:
            # Without white space around it, as the first document of a file lacks the newline before the others.
            start, words = train.tell(), _Words()
            for piece in pieces(source.url, config, tally):
                train.write(piece.encode())
                words.add(piece.removesuffix(config.separator))
                if not piece.endswith(config.separator):
                    continue
                chosen = int.from_bytes(words.digest.digest()[:8], "big") < limit
                if chosen:  # by what is known only now
                    train.seek(start)
                    shutil.copyfileobj(train, valid)
                    train.seek(start)
                    train.truncate()
                tallies["valid" if chosen else "train"].add(words.length)
                start, words = train.tell(), _Words()
    tallies["train"].replaced, tallies["train"].separators_removed = tally.replaced, tally.separators_removed
    if not tallies["train"].documents or not tallies["valid"].documents:
        log.info(
            "Too few documents (%d) to set a fraction aside: the last %g %% of the text are the validation text.",
            tally.documents,
            100 * config.valid_fraction,
        )
        if paths["valid"].stat().st_size:  # the other has no more than white space after the last separator
            with paths["valid"].open("ab") as valid, paths["train"].open("rb") as train:
                shutil.copyfileobj(train, valid)
            paths["valid"].replace(paths["train"])
        _split_tail(paths["train"], paths["valid"], config)
        tallies = {"train": tally, "valid": Tally()}
        tallies["valid"].add(sum(map(len, _decoded(paths["valid"], paths["valid"].stat().st_size))))
    return {name: _written(path) for name, path in paths.items()}, tallies


def _split_tail(train: Path, valid: Path, config: DataConfig) -> None:
    """Move the end of one file into the other, cut where no pretoken is."""
    position, last = 0, ""
    wanted = int(train.stat().st_size * (1 - config.valid_fraction))
    for piece in cut_safely(_decoded(train, wanted), [config.separator], size=1 << 16):
        position += len(last.encode())
        last = piece
    position += len(last[: last_cut(last, [config.separator])].encode())
    if not position:
        raise UserError("The text is too short to set a validation fraction aside; set data.valid_fraction to 0.")
    separator = config.separator.encode()
    with train.open("r+b") as file, valid.open("wb") as tail:
        file.seek(position)
        shutil.copyfileobj(file, tail)
        file.truncate(position)
        file.seek(max(0, position - len(separator)))
        if file.read() != separator:
            file.write(separator)


def _decoded(path: Path, end: int) -> Iterator[str]:
    """The text of a file of ours up to a byte, which may be inside a character."""
    with open_range(str(path), 0, end) as blocks:
        yield from decode_blocks(blocks, str(path), "replace")
