"""The stage ``classifier``: the filter removes what is unlike the wanted examples; what reruns, and the pages."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from lm.common.errors import UserError
from lm.curate.config import ClassifierConfig, FilterConfig, RulesConfig, ScoreConfig
from lm.text.config import ChunkConfig, DataConfig
from tests.helpers.corpora import EOT, write_jsonl, write_text
from tests.helpers.local_executor import LocalExecutor, run_locally
from tests.lm.curate.test_filtered_text import OFF_BUT_LENGTH
from tests.lm.curate.test_scorer import UNWANTED, WANTED

MADE = ["filter-train", "filter-valid", "filter", "chunk-train", "chunk-valid", "chunk"]


def write_examples(folder: Path) -> ScoreConfig:
    wanted = write_text(folder / "wanted.txt", "".join(text + EOT for text in WANTED[::2]))
    unwanted = write_jsonl(folder / "unwanted.jsonl", *(f'{{"text": "{text}"}}' for text in UNWANTED[::2]))
    return ScoreConfig([str(wanted)], [str(unwanted)], 1.0, ClassifierConfig(table_bits=12))


def make_config(folder: Path) -> PipelineConfig:
    texts = [text for pair in zip(WANTED[1::2], UNWANTED[1::2], strict=True) for text in pair]
    train = write_text(folder / "train.txt", "".join(text + EOT for text in texts))
    return PipelineConfig(
        data=DataConfig(train=[str(train)], valid_fraction=0.2),
        filter=FilterConfig(score=write_examples(folder)),
        chunk=ChunkConfig(target_bytes=4000),
    )


def run(config: PipelineConfig, folder: Path) -> LocalExecutor:
    return run_locally(pipeline_stages, config, folder / "root", "chunk")


def test_the_filter_removes_what_is_unlike_the_wanted_examples(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert config.stage_names()[:3] == ["ingest", "classifier", "filter"]
    executor = run(config, tmp_path)
    assert executor.made == ["ingest-train", "ingest", "classifier", *MADE]
    [classifier], [result] = executor.open("classifier"), executor.open("filter")
    least = classifier.json("least_score.json")
    outputs = [*executor.open("filter-train"), *executor.open("filter-valid")]
    rows = [row for output in outputs for row in pq.read_table(output.path("removed.parquet")).to_pylist()]
    kept = "".join(output.path("text.txt").read_bytes().decode() for output in outputs).split(EOT)[:-1]
    assert len(kept) + len(rows) == 200 and {row["reason"] for row in rows} == {"min_score"}
    assert all(row["value"] < least for row in rows)
    assert len(kept) > 80 and set(kept) <= {*WANTED}
    assert f"| min_score | {least:.3g}" in (result.page or "")
    page = classifier.page or ""
    assert "100 % of the wanted examples" in page and page.count("![") == 2
    figures = classifier.manifest["figures"]
    assert figures["wanted"]["passing"] == 1 and figures["unwanted"]["passing"] == 0
    assert figures["wanted"]["trained"] + figures["wanted"]["held_out"] == 100


def test_what_reruns(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run(config, tmp_path)
    assert run(config, tmp_path).made == []
    (tmp_path / "wanted.txt").rename(tmp_path / "moved.txt")
    moved = replace(config.filter.score, wanted=[str(tmp_path / "moved.txt")])
    assert run(replace(config, filter=FilterConfig(score=moved)), tmp_path).made == ["classifier"]
    ruled = replace(config, filter=FilterConfig(RulesConfig(**OFF_BUT_LENGTH), score=moved))
    assert run(ruled, tmp_path).made[:3] == MADE[:3], "the classifier is as it was"
    stricter = FilterConfig(score=replace(moved, kept=0.5))
    assert run(replace(config, filter=stricter), tmp_path).made[:4] == ["classifier", *MADE[:3]]


def test_missing_examples_are_an_error_before_the_first_stage(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "wanted.txt").unlink()
    with pytest.raises(UserError, match=r"wanted\.txt"):
        run(config, tmp_path)
    assert not (tmp_path / "root" / "ingest").exists()
