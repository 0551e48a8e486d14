"""The stage ``deduplicate``: which copies go, that groups do not matter, and what reruns."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from flows.plan import plan
from lm.common.errors import UserError
from lm.curate import RULES, DeduplicateConfig, FilterConfig, RulesConfig, jaccard_similarity
from lm.text.config import ChunkConfig, DataConfig
from tests.helpers.corpora import EOT, write_text
from tests.helpers.local_executor import LocalExecutor, run_locally

SENTENCE = "the keeper of this light climbed up to his lamp and looked out over dark water until morning came again"
BOTH = DeduplicateConfig(equal=True, jaccard_threshold=0.7)


def story(number: int) -> str:
    """Return a text of which no five words are in another one."""
    return " ".join(f"{word}{number}" for word in SENTENCE.split()) + ".\n"


def near(number: int) -> str:
    return story(number) + "One more line."


SOURCES = [
    [story(0), story(1), story(0), "", " ", "!?"],
    [near(1), story(2), f"\n{story(2)} ", story(3)],
    [story(4), story(5)],
    [near(5).upper(), story(6), "<b>`x`</b>\x1b " + near(5), story(0)],
]
KEPT = [story(0), story(1), "", "!?", *map(story, range(2, 7))]


def make_config(folder: Path, copies: DeduplicateConfig = BOTH, **fields: Any) -> PipelineConfig:
    for number, texts in enumerate(SOURCES):
        write_text(folder / f"{number}.txt", "".join(text + EOT for text in texts))
    data = DataConfig(train=[str(folder / f"{number}.txt") for number in range(len(SOURCES))], valid_fraction=0)
    return PipelineConfig(data=data, deduplicate=copies, chunk=ChunkConfig(target_bytes=4000), **fields)


def run(config: PipelineConfig, folder: Path, group_bytes: int = 1) -> LocalExecutor:
    with patch("lm.text.ingest._MAX_GROUP_BYTES", group_bytes):
        return run_locally(pipeline_stages, config, folder / "root", "chunk")


def chunked_text(executor: LocalExecutor) -> list[str]:
    """Return the documents that the stage chunk got."""
    cuts = executor.arguments["chunk-train"]
    texts = [group.open(executor.run.store) for group in cuts]
    documents: list[str] = []
    for group in texts:
        for url, (_, ranges) in zip(group.urls, group.texts, strict=True):
            data = Path(url).read_bytes()
            documents += b"".join(data[start:end] for start, end in ranges).decode().split(EOT)[:-1]
    return documents


@pytest.mark.parametrize("group_bytes", [1, 500, 1 << 30])
def test_the_first_of_equal_and_similar_documents_stays_in_any_groups(tmp_path: Path, group_bytes: int) -> None:
    executor = run(make_config(tmp_path), tmp_path, group_bytes)
    assert sorted(chunked_text(executor)) == sorted(KEPT)
    [output] = executor.open("deduplicate")
    figures = output.manifest["figures"]
    assert (figures["read"]["documents"], figures["equal"]["documents"]) == (16, 4)
    assert figures["near_duplicates"]["documents"] == 3
    assert json.loads(output.path("copy_figures.json").read_text())["clusters"] == {"2": 3, "3": 2}
    [rows, links] = [pq.read_table(output.path(f"{name}.parquet")).to_pylist() for name in ("removed", "links")]
    texts = {(row["source"], row["start"]): row for row in rows}
    assert len(texts) == 7 and sum(row["bytes"] for row in rows) == sum(
        figures[kind]["bytes"] for kind in ("equal", "near_duplicates")
    )

    def read(source: str, start: int) -> str:
        return Path(source).read_bytes()[start:].decode().partition(EOT)[0]

    for row in rows:
        removed, kept = read(row["source"], row["start"]), read(row["kept_source"], row["kept_start"])
        assert kept in KEPT and (row["reason"] == "equal") == (removed.strip() == kept.strip())
    for link in links:
        pair = read(link["source"], link["start"]), read(link["other_source"], link["other_start"])
        assert link["similarity"] == pytest.approx(jaccard_similarity(*pair)) and link["similarity"] >= 0.7
    [statistics] = [output.json("text_groups.json")["statistics"]["train"]]
    assert statistics["documents"] == len(KEPT)
    assert statistics["bytes"] == sum(len((text + EOT).encode()) for text in chunked_text(executor))


def test_what_reruns_after_a_change(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    made = run(config, tmp_path).made
    assert made.count("deduplicate-sign") == 4 and made.count("deduplicate-keep") == 3
    assert run(config, tmp_path).made == []
    same = replace(BOTH, jaccard_threshold=0.71)
    assert run(replace(config, deduplicate=same), tmp_path).made == ["deduplicate"], "no list of removals changed"
    looser = run(replace(config, deduplicate=DeduplicateConfig(equal=True)), tmp_path)
    assert "deduplicate" in looser.made and sorted(chunked_text(looser)) != sorted(KEPT)

    write_text(tmp_path / "4.txt", story(9) + EOT + story(3) + EOT)
    more = replace(config, data=replace(config.data, train=[*config.data.train, str(tmp_path / "4.txt")]))
    executor = run(more, tmp_path)
    assert executor.made[:5] == ["ingest-train", "ingest", "deduplicate-sign", "deduplicate", "deduplicate-keep"]
    assert "deduplicate-keep" not in executor.made[5:], "the new source alone"
    assert sorted(chunked_text(executor)) == sorted([*KEPT, story(9)])


def test_copies_are_removed_from_what_the_filter_keeps(tmp_path: Path) -> None:
    rules = RulesConfig(**{**dict.fromkeys(RULES), "min_characters": 5})  # type: ignore[arg-type]
    config = make_config(tmp_path, filter=FilterConfig(rules))
    executor = run(config, tmp_path)
    assert sorted(chunked_text(executor)) == sorted(text for text in KEPT if len(text) >= 5)
    assert executor.made[:2] == ["ingest-train"] * 2 and executor.made.count("filter-train") == 4


def test_a_plan_follows_the_stages(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    names = [name for name, _ in plan(pipeline_stages, config, str(tmp_path / "root"), "chunk", ())]
    assert names[:2] == ["ingest-train", "ingest"] and "deduplicate" in names
    run(config, tmp_path, 1 << 30)
    rows = plan(pipeline_stages, config, str(tmp_path / "root"), "chunk", ())
    assert all(action.startswith("cached") for _, action in rows)
    other = replace(config, deduplicate=replace(BOTH, ngrams=4))
    rows = plan(pipeline_stages, other, str(tmp_path / "root"), "chunk", ())
    assert [name for name, action in rows if not action.startswith("cached")] == [
        "deduplicate-sign",
        "deduplicate",
        "chunk",
    ]
    assert dict(rows)["deduplicate"] == "runs if the content of deduplicate-sign changes"


def test_the_page_shows_what_was_removed_and_escapes_it(tmp_path: Path) -> None:
    [output] = run(make_config(tmp_path), tmp_path).open("deduplicate")
    page = output.page or ""
    assert "| equal to an earlier document | 4 | 16 |" in page
    assert "| near-duplicates | 3 | 16 |" in page
    assert "| 2 | 3 |" in page and "The largest cluster has 3 documents." in page
    assert "\x1b" not in page
    [line] = [line for line in page.splitlines() if "<b>" in line]
    assert ": `` <b>`x`</b>\\x1b " in line
    assert "- stays: `the0 keeper0" in page


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hashes": 100}, "deduplicate.num_hashes 100 cannot be divided into 14 bands"),
        ({"jaccard_threshold": 0}, "deduplicate.jaccard_threshold is 0"),
        ({"jaccard_threshold": 1.5}, "deduplicate.jaccard_threshold is 1.5"),
    ],
)
def test_a_bad_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeduplicateConfig(**fields)
