"""Web pages through the stages ingest and chunk: text, metadata, skipped pages and keys."""

import gzip
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resiliparse", reason="resiliparse is not installed")
pytest.importorskip("fastwarc", reason="fastwarc is not installed")

from lm.text.config import ChunkConfig, DataConfig
from lm.text.document_metadata import METADATA, read_metadata
from lm.text.pretokenize import GPT2_PATTERN
from tasks.chunk import chunk, chunk_group
from tasks.ingest import find_sources, ingest, ingest_group, page_reader_identity
from tasks.runtime.inputs import read_groups, read_text_groups
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.helpers.corpora import EOT, write_jsonl
from tests.helpers.roots import materialize, run_context
from tests.helpers.web import warc_record, write_warc


def write_sources(folder: Path) -> list[str]:
    """Write a page, a crawl with damage, rows and plain text: they become one text, but for the plain text."""
    page = folder / "a.html"
    page.write_text('<html lang="de"><head><meta name=date content=2024-05-06></head><p>Seite')
    records = [warc_record(f"<p>page {i}".encode(), url=f"http://a/{i}") for i in range(40)]
    records[5:5] = [warc_record(b"<p>bad", length=3), warc_record(b"gone", status="404 Not Found")]
    crawl = write_warc(folder / "b.warc.gz", records)
    rows = write_jsonl(folder / "c.jsonl", '{"text": "a row", "url": "http://row"}')
    plain = folder / "d.txt"
    plain.write_text(f"plain text{EOT}\n")
    (folder / "f.html.gz").write_bytes(gzip.compress(b"<p>cut short")[:-9])
    wet = write_warc(folder / "e.warc.wet.gz", [warc_record(b"wet", url="http://w/", record_type="conversion")])
    return [str(page), crawl, rows, str(plain), wet, str(folder / "f.html.gz")]


class Ingested:
    """The outputs of the stages up to ``ingest``."""

    def __init__(self, root: Path, urls: list[str], fraction: float, **data: Any) -> None:
        self.run: RunContext = run_context(root)
        self.data = DataConfig(train=urls, **data)
        sources, _ = find_sources(self.data, self.run.store)
        identity = page_reader_identity(self.data, sources)
        arguments = fraction, self.data, *([[], identity] if identity else [])
        self.groups = [materialize(ingest_group, self.run, sources, *arguments)]
        self.texts = materialize(ingest, self.run, self.groups, [], fraction, self.data)
        [self.group], self.output = [read_output(self.run.store, ref) for ref in self.groups], self.open(self.texts)

    def open(self, ref: Ref) -> Output:
        return read_output(self.run.store, ref)


@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_metadata_are_in_step_with_the_documents_of_chunks(tmp_path: Path, fraction: float) -> None:
    ingested = Ingested(tmp_path / "root", write_sources(tmp_path), fraction)
    store, found = ingested.run.store, {}
    for split in ("train", "valid"):
        texts = read_text_groups(store, ingested.texts, ingested.groups, split)
        arguments = [EOT], GPT2_PATTERN, ChunkConfig(target_bytes=100)
        cuts = [materialize(chunk_group, ingested.run, text, *arguments) for text in texts]
        chunks = materialize(chunk, ingested.run, cuts if split == "train" else [], cuts if split == "valid" else [])
        for group in read_groups(store, chunks, texts, cuts, split):
            for url, part in group.open(store):
                path = Path(url)
                if path.name == "d.txt":
                    continue
                for row in read_metadata(path.with_name(METADATA), path.name, [(part.start, part.end)]).to_pylist():
                    assert part.start <= row["start"] and row["end"] <= part.end
                    text = path.read_bytes()[row["start"] : row["end"]].decode()
                    found[text.removesuffix(EOT)] = row
    assert found.keys() == {"Seite", "wet", *(f"page {i}" for i in range(40))}
    assert all(row["url"] == f"http://a/{text[5:]}" for text, row in found.items() if text.startswith("page"))
    assert found["Seite"]["language"] == "de" and found["Seite"]["date"] == "2024-05-06"
    assert found["wet"]["date"] == "2024-01-02T03:04:05Z"
    sources = {text: row["source"] for text, row in found.items() if row["text"] != "valid.txt"}
    assert {text: number for text, number in sources.items() if number != 1} == {
        text: number for text, number in (("Seite", 0), ("wet", 4)) if text in sources
    }
    assert any(row["text"] == "valid.txt" for row in found.values()) == bool(fraction)


def test_skipped_pages_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ingested = Ingested(tmp_path / "root", write_sources(tmp_path), 0.0)
    assert "Skipped 2 damaged web pages and records" in caplog.text and "b.warc.gz, record at byte" in caplog.text
    page = ingested.output.page or ""
    assert (
        "| damaged | 2 |" in page
        and "| not HTTP status 200 | 1 |" in page
        and "its length is wrong" in page
        and "f.html.gz: is corrupt" in page
    )


def test_the_option_decides_the_text_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("<nav>menu menu menu</nav><main><p>The text of the page is here.</p></main>")
    main, whole = (Ingested(tmp_path / "root", [str(path)], 0.0, page_text=kind) for kind in ("main", "whole"))
    texts = [ingested.group.path("text.txt").read_text() for ingested in (main, whole)]
    assert "menu" not in texts[0] and "menu" in texts[1]
    assert main.groups != whole.groups


def test_sources_without_metadata_have_the_keys_and_files_of_before(tmp_path: Path) -> None:
    """Fields that these stages got for web pages are not in the keys of other sources."""
    plain = tmp_path / "a.txt.gz"
    plain.write_bytes(gzip.compress(f"one{EOT}two{EOT}".encode()))
    rows = write_jsonl(tmp_path / "b.jsonl", '{"text": "a row", "url": "http://row"}')
    ingested = Ingested(tmp_path / "root", [str(plain), rows], 0.0, page_text="whole")
    parameters = ingested.group.manifest["ingredients"]["parameters"]
    assert parameters.keys() == {"group", "fraction", "data"}
    assert parameters["data"] == {
        "separator": EOT,
        "text_field": "text",
        "invalid_utf8": "error",
        "separator_in_document": "error",
    }
    assert [file["path"] for file in ingested.group.manifest["files"]] == ["text.txt", "texts.json"]
    assert ingested.group.json("texts.json").keys() == {
        *("kept", "held_out_bytes", "kept_statistics", "held_out_statistics"),
    }
    assert [file["path"] for file in ingested.output.manifest["files"]] == ["text_groups.json"]
