"""Ingest of sources in tests, as the stages do it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.text.config import DataConfig
from lm.text.held_out import combine_groups, join_held_out, valid_fraction
from lm.text.ingest import HELD_OUT, GroupTexts, Text, group_sources, read_group
from lm.text.sources import Source, expand_urls, hash_source


def sources(*urls: str | Path) -> list[Source]:
    return [hash_source(url) for url in expand_urls(map(str, urls))]


def ingest_sources(train: list[Source], valid: list[Source], config: DataConfig, out: Path) -> dict[str, Any]:
    """Read the groups of sources into folders of ``out`` and combine them.

    Returns the texts of each split, ``train`` and ``valid``, as dicts with their place (a file below ``out`` or the
    number of a source, counted over ``train`` and then ``valid``) and their byte ranges, and their ``statistics``.
    """
    fraction = 0.0 if valid else valid_fraction(config, sum(source.bytes for source in train))
    groups = [*group_sources(train), *group_sources(valid)]
    first_sources = [sum(map(len, groups[:number])) for number in range(len(groups))]
    texts = []
    for number, group in enumerate(groups):
        (out / str(number)).mkdir(parents=True)
        texts.append(read_group(group, config, fraction, out / str(number)))
    texts = [GroupTexts.from_json(json.loads(json.dumps(group.to_json()))) for group in texts]
    train_groups = len(group_sources(train))

    def url_of(number: int, text: Text) -> str:
        return str(out / str(number) / text.file) if text.file else groups[number][text.source or 0].url

    splits = combine_groups(texts[:train_groups], texts[train_groups:], config, fraction, url_of)
    held_out = sorted(out.glob(f"*/{HELD_OUT}"), key=lambda path: int(path.parent.name))
    result: dict[str, Any] = {"statistics": {}}
    for name, split in splits.items():
        result[name] = [
            {
                "file": f"{selection.group}/{text.file}" if text.file else None,
                "source": None if text.source is None else first_sources[selection.group or 0] + text.source,
                "ranges": [list(interval) for interval in ranges],
            }
            for selection, _ in split.selections
            if selection.group is not None
            for text, ranges in selection.texts(texts[selection.group])
        ]
        if any(selection.group is None for selection, _ in split.selections):
            groups_held_out = [group for group in texts if group.held_out_bytes]
            (text,) = join_held_out(groups_held_out, held_out, out / "valid.txt").kept
            result[name] = [{"file": text.file, "source": None, "ranges": text.ranges}]
        result["statistics"][name] = {**asdict(split.statistics), "bytes": sum(size for _, size in split.selections)}
    return result


def written_files(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def run(
    out: Path, train: list[Source], valid: list[Source] | None = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ingest into the new directory ``out``. Returns (content of texts.json, text of each split)."""
    config = DataConfig(**fields)
    result = ingest_sources(train, valid or [], config, out)
    texts = {}
    for name in ("train", "valid"):
        stored = [stored_text(text, out, [*train, *(valid or [])]) for text in result[name]]
        assert result["statistics"][name]["bytes"] == len("".join(stored).encode())
        texts[name] = "".join(  # a file written by ingest ends with a separator
            whole if text["file"] and text["ranges"] == [[0, len(whole.encode())]] else closed(whole, config.separator)
            for whole, text in zip(stored, json.loads(json.dumps(result[name])), strict=True)
        )
    return result, texts


def stored_text(text: dict[str, Any], out: Path, sources: list[Source]) -> str:
    """Return the stored bytes of an entry of texts.json as text."""
    data = (out / text["file"] if text["file"] else Path(sources[text["source"]].url)).read_bytes()
    edges = [edge for ends in text["ranges"] for edge in ends]
    assert edges == sorted(set(edges)) and edges[-1] <= len(data), "ranges ascend, with gaps between them"
    return b"".join(data[start:end] for start, end in text["ranges"]).decode()


def closed(text: str, separator: str) -> str:
    """Append a separator to a text whose last document lacks it, as encoding does."""
    return text + separator if text.split(separator)[-1].strip() else text
