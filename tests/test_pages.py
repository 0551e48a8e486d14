"""The pages of the stages and the report of a run: Markdown that says something, with pictures that open."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterName

from flows.pipeline import pipeline
from flows.report import outputs_of
from lm.errors import UserError
from lm.tokenizer import Tokenizer
from tasks import pages
from tasks.output import PAGE, Ref, read_output
from tasks.stage import Draft, Run, Stage
from tests.deployed import TINY

STAGES = ["ingest", "chunk", "count", "merge", "encode", "train", "sample"]
SAYS = {
    "ingest": "| documents |",
    "chunk": "| train | 5 |",
    "count": "### Commonest",
    "merge": "**300** token ids: 256 bytes, 43 merges, special tokens `<|endoftext|>`",
    "encode": "MB a second of one core",
    "train": "| FLOPs a token, forward and backward |",
    "sample": "`Once` goes on:",
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, Any]:
    """Of a run of the whole chain."""
    return pipeline(TINY, str(tmp_path_factory.mktemp("pages")))


def page_of(record: dict[str, Any], stage: str) -> str:
    page = outputs_of(Run(record["root"], ""), record)[stage].page
    assert page
    return page


def artifacts(name: str) -> dict[str, str]:
    """Markdown artifacts of a run, by key."""
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        )
    return {str(artifact.key): str(artifact.data) for artifact in found if artifact.type == "markdown"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_page_says_what_came_of_its_stage(record: dict[str, Any], stage: str) -> None:
    page = page_of(record, stage)
    assert SAYS[stage] in page
    pictures = re.findall(r"!\[[^]]+]\(data:image/(png|svg\+xml);base64,([^)]+)\)", page)
    assert pictures
    for kind, data in pictures:
        raw = base64.b64decode(data)
        if kind == "png":
            image = Image.open(io.BytesIO(raw))
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10  # not blank
        else:
            assert raw.startswith(b"<svg")
    for row in re.findall(r"^\|.*\|$", page, re.MULTILINE):
        assert row.replace("\\|", "").count("|") >= 3


def test_the_artifacts_are_the_pages_and_a_report_of_them_all(record: dict[str, Any]) -> None:
    found = artifacts(record["name"])
    assert set(found) == {*STAGES, "report"}
    report = (Path(record["root"]) / "runs" / f"{record['name']}.md").read_text(encoding="utf-8")
    assert report == found["report"]
    for stage in STAGES:
        assert page_of(record, stage) in found[stage]
        assert page_of(record, stage) in report
        assert f"file://{record['root']}/{stage}/{record['stages'][stage]['key']}" in found[stage]


def test_a_cached_stage_shows_its_page_too(record: dict[str, Any]) -> None:
    again = pipeline(TINY, record["root"], until="merge")
    assert {stage["state"] for stage in again["stages"].values()} == {"cached"}
    found = artifacts(again["name"])
    assert set(found) == {"ingest", "chunk", "count", "merge", "report"}
    assert found["merge"] == artifacts(record["name"])["merge"]


def test_a_failed_run_reports_how_far_it_came(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 7"):
        pipeline(TINY | {"model": {"vocab_size": 7}}, record["root"])
    newest = max(Path(record["root"]).glob("runs/*.md"), key=lambda path: path.stat().st_mtime)
    report = newest.read_text(encoding="utf-8")
    assert "**It failed: model.vocab_size is 7" in report
    assert "| encode | cached |" in report
    assert "## train" not in report


def test_a_page_is_no_part_of_an_output(record: dict[str, Any]) -> None:
    output = outputs_of(Run(record["root"], ""), record)["count"]
    before = output.digest
    Path(output.url, PAGE).unlink()
    assert output.is_intact()
    assert read_output(Run(record["root"], "").store, output.ref).digest == before
    again = pipeline(TINY, record["root"], until="count")
    assert again["stages"]["count"]["state"] == "cached"
    assert "- pretokens " in artifacts(again["name"])["count"]  # the figures stand in for it


def test_a_page_that_fails_fails_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(out: Draft, text: str) -> None:
        (out.directory / "text.txt").write_text(text)

    def page(out: Draft, text: str) -> str:
        raise ZeroDivisionError

    run = Run(str(tmp_path), "run")
    stage = Stage("pageless", body, page=page)
    output = read_output(run.store, Ref(*stage.make(run, {"text": "a"})))
    assert output.path("text.txt").read_text() == "a"
    assert output.page is None
    assert "The page of pageless could not be made" in caplog.text


@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)))
def test_code_is_one_cell_of_a_table_whatever_is_in_it(text: str | bytes) -> None:
    table = pages.table(("a", "b"), [(pages.code(text), "x")])
    assert table.isprintable() or set(filter(lambda character: not character.isprintable(), table)) == {"\n"}
    row = table.split("\n")[2:]
    assert len(row) == 1
    assert len(re.split(r"(?<!\\)\|", row[0])) == 4
    span = row[0].split(" | x |")[0].removeprefix("| ")
    fence = re.match("`+", span)
    assert fence
    assert span.endswith(fence.group())
    assert not re.search(rf"(?<!`){fence.group()}(?!`)", span[len(fence.group()) : -len(fence.group())])


def test_code_shows_each_blank_at_the_ends_once() -> None:
    assert [pages.code(text) for text in (" ", "  ", " a b  ")] == ["`␣`", "`␣␣`", "`␣a b␣␣`"]


@given(st.text("ab \n東🙂é<&", max_size=60))
def test_the_segments_of_a_text_join_to_it(text: str) -> None:
    tokenizer = Tokenizer({index: bytes([index]) for index in range(256)}, [])
    segments = pages._segments(tokenizer, text)
    assert (
        b"".join(segment.encode() if len(segment) == 1 else bytes.fromhex(segment) for segment in segments)
        == text.encode()
    )
    assert base64.b64decode(pages._segmentation(segments).partition("base64,")[2][:-1]).startswith(b"<svg")
