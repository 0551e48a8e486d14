"""The pages of the stages and the report of a run: Markdown with valid pictures."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterName

from flows.pipeline import pipeline
from lm.common.errors import UserError
from lm.tokenizer.tokenizer import Tokenizer
from tasks.pages import charts, markdown, sweep, training
from tasks.runs import run_report as report
from tasks.runs.run_record import outputs_of
from tasks.runtime.output import PAGE, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage
from tests.helpers.deployed import TINY
from tests.helpers.roots import materialize

CONFIG: Any = TINY  # Prefect makes a PipelineConfig of it
STAGES = ["ingest", "chunk", "count", "merge", "encode", "train", "sample"]
PAGE_TEXTS = {
    "ingest": "| documents |",
    "chunk": "| train | 5 |",
    "count": "### Most common",
    "merge": "**300** token ids: 256 bytes, 43 merges, special tokens `<|endoftext|>`",
    "encode": "MB per CPU-second",
    "train": "| FLOPs per token, forward and backward |",
    "sample": "Prompt: `Once`",
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, Any]:
    """Return the record of a run of all stages."""
    return pipeline(CONFIG, str(tmp_path_factory.mktemp("pages")))


def page_of(record: dict[str, Any], stage: str) -> str:
    page = outputs_of(RunContext(record["root"], ""), record)[stage].page
    assert page
    return page


def artifacts(name: str) -> dict[str, str]:
    """Markdown artifacts of a run, by key."""
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        shown = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        )
    keys = [str(artifact.key) for artifact in shown if artifact.type == "markdown"]
    assert all(key.startswith(f"{name}-") for key in keys)
    return {str(item.key).rpartition("-")[2]: str(item.data) for item in shown if item.type == "markdown"}


@pytest.mark.parametrize("stage", STAGES)
def test_the_page_of_each_stage(record: dict[str, Any], stage: str) -> None:
    page = page_of(record, stage)
    assert PAGE_TEXTS[stage] in page
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


def test_the_pages_tell_what_rare_pretokens_cost(record: dict[str, Any]) -> None:
    row = re.search(r"^\| 2 \| ([\d,]+) \| [\d,]+ \| ([\d.]+) % \|", page_of(record, "count"), re.MULTILINE)
    assert row
    total = outputs_of(RunContext(record["root"], ""), record)["count"].manifest["figures"]["unique"]
    left_out = total - int(row[1].replace(",", ""))
    assert left_out > 0
    run = pipeline(CONFIG | {"tokenizer": {"vocab_size": 300, "min_count": 2}}, record["root"], until="merge")
    sentence = f"{left_out:,} rare pretokens, {100 - float(row[2]):.2f} % of all occurrences, were left out"
    assert sentence in page_of(run, "merge")


def test_the_artifacts_are_the_pages_and_a_report_of_them_all(record: dict[str, Any]) -> None:
    shown = artifacts(record["name"])
    assert set(shown) == {*STAGES, "report"}
    text = (Path(record["root"]) / "runs" / f"{record['name']}.md").read_text(encoding="utf-8")
    assert text.startswith(shown["report"]), "the file holds the pages too, the artifact does not repeat them"
    assert "base64" not in shown["report"]
    for stage in STAGES:
        assert page_of(record, stage) in shown[stage]
        assert page_of(record, stage) in text
        assert f"file://{record['root']}/{stage}/{record['stages'][stage]['key']}" in shown[stage]


def test_a_run_that_makes_nothing_uploads_a_table_alone(record: dict[str, Any]) -> None:
    again = pipeline(CONFIG, record["root"], until="merge")
    assert {stage["state"] for stage in again["stages"].values()} == {"cached"}
    shown = artifacts(again["name"])
    assert set(shown) == {"report"}
    assert len(shown["report"]) < 5_000
    assert shown["report"].count(f"| {record['name']}, ") == 4, "it names the run that made each stage"


def test_a_key_of_an_artifact_is_the_name_of_the_run_in_plain_letters() -> None:
    assert RunContext("root", "20261130-005148-full-Ünd so_weiter!").label == "20261130-005148-full-nd-so-weiter"


def test_the_report_of_a_failed_run(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 7"):
        pipeline(CONFIG | {"model": {"vocab_size": 7}}, record["root"])
    newest = max(Path(record["root"]).glob("runs/*.md"), key=lambda path: path.stat().st_mtime)
    text = newest.read_text(encoding="utf-8")
    assert r"**The run failed:** model\.vocab\_size is 7" in text
    assert "| encode | cached |" in text
    assert "## train" not in text


def test_a_page_is_not_content(record: dict[str, Any]) -> None:
    output = outputs_of(RunContext(record["root"], ""), record)["count"]
    before = output.digest
    Path(output.url, PAGE).unlink()
    assert output.is_intact()
    assert read_output(RunContext(record["root"], "").store, output.ref).digest == before
    assert "- pretokens " in report.page_of(output)  # the figures stand in for it


def test_a_failing_page_does_not_fail_the_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(out: Attempt, text: str) -> None:
        (out.directory / "text.txt").write_text(text)

    def page(out: Attempt, text: str) -> Iterator[str]:
        yield "the first paragraph"
        raise ZeroDivisionError

    run = RunContext(str(tmp_path), "run")
    stage = Stage("pageless", body, page=page)
    output = read_output(run.store, materialize(stage, run, "a"))
    assert output.path("text.txt").read_text() == "a"
    assert output.page is None
    assert "The page of pageless could not be made" in caplog.text


@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)))
def test_any_text_as_code_is_one_table_cell(text: str | bytes) -> None:
    table = markdown.table(("a", "b"), [(markdown.code(text), "x")])
    assert table.isprintable() or set(filter(lambda character: not character.isprintable(), table)) == {"\n"}
    row = table.split("\n")[2:]
    assert len(row) == 1
    assert sum(len(backslashes) % 2 == 0 for backslashes in re.findall(r"(\\*)\|", row[0])) == 3
    span = row[0].split(" | x |")[0].removeprefix("| ")
    fence = re.match("`+", span)
    assert fence
    assert span.endswith(fence.group())
    assert not re.search(rf"(?<!`){fence.group()}(?!`)", span[len(fence.group()) : -len(fence.group())])


def test_code_shows_each_space_at_the_ends() -> None:
    assert [markdown.code(text) for text in (" ", "  ", " a b  ")] == ["`␣`", "`␣␣`", "`␣a b␣␣`"]


@given(st.text("ab \n\t東🙂é<&\x00", max_size=60))
def test_the_tokens_of_a_text_join_to_it(text: str) -> None:
    tokenizer = Tokenizer({index: bytes([index]) for index in range(256)}, [])
    segments = charts.token_texts(tokenizer, text)
    assert all(len(segment) == 1 or segment[0] == "\\" for segment in segments)
    read = [segment.encode().decode("unicode_escape").encode("latin-1") for segment in segments]
    assert b"".join(read) == text.encode()
    assert base64.b64decode(charts.token_picture(segments).partition("base64,")[2][:-1]).startswith(b"<svg")


def test_bytes_of_a_token_that_are_no_text_are_escaped() -> None:
    vocab = {index: bytes([index]) for index in range(256)} | {256: " naï".encode()[:4], 257: b"\n\x00a"}
    tokenizer = Tokenizer(vocab, [])
    tokenizer.encode = lambda text, allowed_special: [256, 0xAF, 257, 9]  # type: ignore[assignment,misc]
    assert charts.token_texts(tokenizer, "") == [" na\\xc3", "\\xaf", "\n\\x00a", "\\t"]


def test_the_heat_map_of_experts_has_a_colour_for_each_load() -> None:
    """Expert 1 of block 1 is overloaded from step 20 on, expert 2 has no tokens; block 2 is balanced."""
    figures = {"expert_load_max": 2.0, "expert_load_entropy": 0.5, "dead_experts": 1, "aux_loss": 1.5, "z_loss": 0.25}
    rows: list[dict[str, Any]] = [
        {"step": 10, "expert_loads": [[1.0, 1.0], [1.0, 1.0]], **figures},
        {"step": 15, "valid_loss": 3.0},
        {"step": 20, "expert_loads": [[2.0, 0.0], [1.0, 1.0]], **figures},
    ]
    table, picture = training.expert_loads(rows, 0)
    assert "| step 20 |" in table and "| experts without a token | 1 |" in table
    image = Image.open(io.BytesIO(base64.b64decode(picture.partition("base64,")[2].rstrip(")")))).convert("RGB")
    width, height = image.size
    counts: list[Any] = image.getcolors(width * height) or []
    colours = matplotlib.colormaps["RdBu_r"]
    for load, cells in ((2.0, 1), (0.0, 1), (1.0, 6)):
        red, green, blue = (round(255 * part) for part in colours(load / 2)[:3])
        pixels = sum(count for count, (r, g, b) in counts if abs(r - red) + abs(g - green) + abs(b - blue) < 6)
        # The map covers about half of the picture, and each of the 8 cells an equal part of it.
        assert cells / 8 * 0.3 < pixels / (width * height) < cells / 8 * 0.9, load
    assert list(training.expert_loads(rows[1:2], 0)) == []
    _, with_dense_block = training.expert_loads(rows, 1)
    assert with_dense_block != picture, "the names of the blocks"


@pytest.mark.parametrize("text", ["a|b", r"a\|b", r"a\\|b", "|\\", "a\nb\r\nc", "\n"])
def test_a_cell_stays_one_cell_in_the_ui(text: str) -> None:
    for row in (markdown.cell(text), sweep_cell := markdown.cell(sweep._text(text))):
        assert not re.search(r"[\r\n]", row)
        assert all(len(run) % 2 for run in re.findall(r"(\\*)\|", row)), "an even number of backslashes ends the cell"
    assert sweep_cell == markdown.cell(text), "escaped once"


def test_figures_are_shown_but_for_zero_counts() -> None:
    figures = {"accuracy": 0.0, "steps": 0, "kl": 0.0003, "loss": 2.5, "flops": 1.5e18, "valid_loss": None}
    shown = ["accuracy 0.000", "kl 0.0003", "loss 2.500", "flops 1.5e+18"]
    assert list(report.format_figures(figures)) == shown


def test_text_keeps_its_spaces_and_makes_no_heading_or_code_block() -> None:
    escaped = markdown.escape_markdown("a\tb\u3000c\n===\n\tx | y\r")
    assert escaped == "a   b\u3000c  \n\\=\\=\\=  \n\u00a0\u00a0\u00a0\u00a0x | y"
