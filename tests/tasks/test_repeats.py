"""The stage ``repeats``: which lines go, that groups do not matter, and what reruns."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.config import PipelineConfig
from lm.curate import DeduplicateConfig
from lm.curate.config import Unit
from lm.text.config import ChunkConfig, DataConfig
from tests.helpers.corpora import EOT, write_text
from tests.tasks.test_deduplicate import chunked_text, run

MENU = "Home | News | <b>Contact</b>\x1b"
SOURCES = [
    [f"{MENU}\nThe first text.\n\nIt has two paragraphs.\nWith two lines.", f"{MENU}\n{MENU}\n"],
    ["The first text.\r\nMore.\n\n\nIt has two paragraphs.\nWith two lines.\n", ""],
    ["Only here.", "\n \n", "Home\nNews\n", f"News\n\n{MENU}\nThe end."],
]


def make_config(folder: Path, unit: Unit, **fields: Any) -> PipelineConfig:
    for number, texts in enumerate(SOURCES):
        write_text(folder / f"{number}.txt", "".join(text + EOT for text in texts))
    data = DataConfig(train=[str(folder / f"{number}.txt") for number in range(len(SOURCES))], valid_fraction=0)
    copies = DeduplicateConfig(repeats=unit)
    return PipelineConfig(data=data, deduplicate=copies, chunk=ChunkConfig(target_bytes=4000), **fields)


def expected(unit: Unit) -> list[str]:
    """Return the documents without repeated parts, in plain Python."""
    separator = "\n" if unit == "line" else "\n\n"
    counts = Counter(part for texts in SOURCES for text in texts for part in _parts(text, separator))
    kept = []
    for text in (text for texts in SOURCES for text in texts):
        left, rest = "", text
        changed = False
        for part in _parts(text, separator):
            assert rest.startswith(part)
            rest = rest[len(part) :]
            feeds = len(rest) - len(rest.lstrip("\n")) if unit == "paragraph" else int(rest.startswith("\n"))
            if counts[part] > 1 and part.strip():
                changed = True
            else:
                left += part + rest[:feeds]
            rest = rest[feeds:]
        if not changed or left.strip():
            kept.append(left)
    return kept


def _parts(text: str, separator: str) -> list[str]:
    if separator == "\n":
        return text.split("\n")[: None if not text.endswith("\n") else -1] if text else []
    parts: list[str] = []
    for piece in text.split("\n\n"):
        part = piece.lstrip("\n") if parts else piece
        parts.append(part)
    return [part.rstrip("\n") if number == len(parts) - 1 else part for number, part in enumerate(parts) if part]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
def test_repeated_parts_go_everywhere_in_any_groups(tmp_path: Path, unit: Unit, group_bytes: int) -> None:
    executor = run(make_config(tmp_path, unit), tmp_path, group_bytes)
    assert sorted(chunked_text(executor)) == sorted(expected(unit))
    [output] = executor.open("repeats")
    statistics = output.json("text_groups.json")["statistics"]["train"]
    assert statistics["documents"] == len(chunked_text(executor))
    assert statistics["bytes"] == sum(len((text + EOT).encode()) for text in chunked_text(executor))
    rows = [
        row for part in executor.open("repeats-drop") for row in pq.read_table(part.path("changed.parquet")).to_pylist()
    ]
    assert sum(row["repeated"] for row in rows) == output.manifest["figures"][f"{unit}s"]
    for row in rows:
        text = Path(row["source"]).read_bytes()[row["start"] :][: row["bytes"]].decode()
        assert text in [text for texts in SOURCES for text in texts] and row["bytes_left"] < row["bytes"]


def test_what_is_repeated() -> None:
    lines = expected("line")
    assert lines[0] == "The first text.\n\n" and lines[-1] == "\nThe end."
    assert "Only here." in lines and "\n \n" in lines, "blank text stays as it was"
    assert not any(MENU in text for text in lines)
    paragraphs = expected("paragraph")
    assert paragraphs[0] == f"{MENU}\nThe first text.\n\n", "a paragraph of several lines is one"


def test_what_reruns_after_a_change(tmp_path: Path) -> None:
    config = make_config(tmp_path, "line")
    made = run(config, tmp_path).made
    assert made.count("repeats-digest") == 3 and made.count("repeats-drop") == 3
    assert run(config, tmp_path).made == []
    write_text(tmp_path / "3.txt", "Another text." + EOT)
    more = replace(config, data=replace(config.data, train=[*config.data.train, str(tmp_path / "3.txt")]))
    executor = run(more, tmp_path)
    assert executor.made[:5] == ["ingest-train", "ingest", "repeats-digest", "repeats-find", "repeats"]
    assert "Another text." in chunked_text(executor)


def test_copies_of_documents_go_first_and_the_page_escapes(tmp_path: Path) -> None:
    config = make_config(tmp_path, "line")
    write_text(tmp_path / "0.txt", "Twice the same.\n" + EOT + "Twice the same." + EOT + f"{MENU}\nOnce." + EOT)
    write_text(tmp_path / "1.txt", MENU + EOT)
    executor = run(replace(config, deduplicate=DeduplicateConfig(equal=True, repeats="line")), tmp_path)
    texts = chunked_text(executor)
    assert "Twice the same.\n" in texts, "its copy is gone before lines are compared"
    assert "Once." in texts and not any(MENU in text for text in texts)
    [output] = executor.open("repeats")
    page = output.page or ""
    assert "\x1b" not in page and r"Home | News | <b>Contact</b>\x1b" in page
    assert json.loads(executor.open("repeats-find")[0].path("losing_groups.json").read_text())["groups"]
