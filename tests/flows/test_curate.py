"""The flow ``curate``: the same text as the pipeline's, in files for other tools."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.config import PipelineConfig
from flows.curate import CurateConfig, curate_stages
from flows.pipeline import pipeline_stages
from flows.plan import plan
from lm.common.errors import UserError
from lm.curate import DeduplicateConfig, FilterConfig, RulesConfig
from lm.curate.config import DecontaminateConfig
from lm.text.config import DataConfig
from tests.helpers.corpora import EOT, write_jsonl, write_text
from tests.helpers.local_executor import LocalExecutor, run_locally
from tests.helpers.web import warc_record, write_warc
from tests.lm.curate.test_rules import GOOD
from textmill.cli.main import main

TEXTS = [f"{GOOD}\nNumber {number} “ü”." for number in range(20)] + ["too short", GOOD, GOOD]
KEPT = [*TEXTS[:20], GOOD]


def make_config(folder: Path) -> CurateConfig:
    source = write_text(folder / "a.txt", "".join(text + EOT for text in TEXTS))
    data = DataConfig(train=[str(source)], valid_fraction=0)
    return CurateConfig(data=data, filter=FilterConfig(RulesConfig()), deduplicate=DeduplicateConfig(equal=True))


def read_lines(executor: LocalExecutor) -> list[dict[str, str]]:
    """Return the rows of all files, in the order of their names."""
    [output] = executor.open("export")
    rows: list[dict[str, str]] = []
    for file in sorted(output.manifest["files"], key=lambda file: file["path"]):
        with pa.CompressedInputStream(str(output.path(file["path"])), "zstd") as stream:
            rows += map(json.loads, stream.read().decode().splitlines())
    return rows


def test_the_text_is_written_as_json_lines_or_parquet(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    executor = run_locally(curate_stages, config, tmp_path / "root")
    assert [*executor.finished] == ["ingest", "filter", "deduplicate", "export"] == config.stage_names()
    assert read_lines(executor) == [{"text": text} for text in KEPT]
    [output] = executor.open("export")
    assert [file["path"] for file in output.manifest["files"]] == ["train-00000.jsonl.zst"]
    assert output.manifest["figures"]["train"]["documents"] == len(KEPT)
    executor = run_locally(curate_stages, replace(config, format="parquet"), tmp_path / "root")
    assert executor.made == ["export-train", "export"]
    [output] = executor.open("export")
    assert pq.read_table(output.path("train-00000.parquet")).to_pylist() == [{"text": text} for text in KEPT]


def test_the_pipeline_takes_the_text_from_the_cache(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_locally(curate_stages, config, tmp_path / "root")
    same = PipelineConfig(data=config.data, filter=config.filter, deduplicate=config.deduplicate)
    assert run_locally(pipeline_stages, same, tmp_path / "root", "chunk").made == ["chunk-train", "chunk"]


def test_without_rules_the_text_is_only_written(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), filter=FilterConfig(), deduplicate=DeduplicateConfig())
    executor = run_locally(curate_stages, config, tmp_path / "root")
    assert executor.made == ["ingest-train", "ingest", "export-train", "export"]
    assert [row["text"] for row in read_lines(executor)] == TEXTS
    with pytest.raises(UserError, match="There is no stage filter: nothing is filtered"):
        plan(curate_stages, config, str(tmp_path / "root"), "filter", ())


def test_a_document_past_the_limit_is_written_whole(tmp_path: Path) -> None:
    long = "é" * (9 << 20)
    data = DataConfig(train=[str(write_text(tmp_path / "a.txt", f"{long}{EOT}b{EOT}"))], valid_fraction=0)
    executor = run_locally(curate_stages, CurateConfig(data=data), tmp_path / "root")
    assert [row["text"] for row in read_lines(executor)] == [long, "b"]


def test_the_command_plans_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_text(tmp_path / "a.txt", GOOD + EOT)
    assert main(["curate", "--plan", "--root", str(tmp_path / "root"), "--data.train", str(source)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["ingest-train", "ingest", "filter", "deduplicate", "export"]


def test_metadata_stay_with_their_documents_through_all_stages(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse", reason="resiliparse is not installed")
    pytest.importorskip("fastwarc", reason="fastwarc is not installed")
    texts = [GOOD, "short", *TEXTS[1:4], TEXTS[2], f"{TEXTS[5]} Write to a@example.com.", *TEXTS[6:9]]
    pages = [warc_record(f"<p>{text}".encode(), url=f"http://a/{number}") for number, text in enumerate(texts)]
    crawl = write_warc(tmp_path / "b.warc.gz", pages)
    rows = write_jsonl(tmp_path / "c.jsonl", json.dumps({"text": TEXTS[10]}))
    protected = write_text(tmp_path / "test.txt", "number 7 ü " + GOOD.replace("\n", " ") + EOT)
    config = CurateConfig(
        data=DataConfig(train=[crawl, str(rows)], valid_fraction=0),
        filter=FilterConfig(RulesConfig(fineweb_max_duplicate_line_characters=None), masks=["email"]),
        deduplicate=DeduplicateConfig(equal=True),
        decontaminate=DecontaminateConfig(files=[str(protected)], ngrams=60, action="cut"),
    )
    executor = run_locally(curate_stages, config, tmp_path / "root")
    urls = [row["url"] for row in read_lines(executor)]
    assert urls == [f"http://a/{number}" for number in range(len(texts)) if number not in (1, 5)] + [None]
    assert all(set(row) == {"text", "url", "date", "language", "licence"} for row in read_lines(executor))
    [masked] = [row for row in read_lines(executor) if row["url"] == "http://a/6"]
    assert masked["text"].endswith("Write to |||EMAIL_ADDRESS|||.")
