"""Ingest: order of sources, and files that are copied or read in place."""

import bz2
import gzip
import http.server
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.files.urls import open_filesystem
from lm.text.chunks import cut_chunks
from lm.text.config import DataConfig
from lm.text.demo_corpus import demo_stories
from lm.text.sources import open_ranges
from tests.helpers.corpora import EOT, serve_http, write_jsonl, write_parquet, write_text
from tests.helpers.ingesting import ingest_sources, run, sources, written_files


def test_plain_local_files_are_referenced(tmp_path: Path) -> None:
    a, b, c = (write_text(tmp_path / f"{name}.txt", f"{name}{EOT}") for name in "abc")
    result, texts = run(tmp_path / "out", sources(a, b), sources(c))
    assert [text["source"] for text in result["train"]] == [0, 1]
    assert [text["source"] for text in result["valid"]] == [2]
    assert [text["file"] for text in result["train"] + result["valid"]] == [None] * 3
    assert written_files(tmp_path / "out") == []
    assert texts == {"train": f"a{EOT}b{EOT}", "valid": f"c{EOT}"}
    assert [result["statistics"][name]["documents"] for name in ("train", "valid")] == [2, 1]


def test_mixed_sources_keep_their_order(tmp_path: Path) -> None:
    urls: list[str | Path] = [
        write_jsonl(tmp_path / "1.jsonl", '{"text": "1"}'),
        write_text(tmp_path / "2.txt", f"2{EOT}\n"),
        tmp_path / "3.txt.gz",
        write_parquet(tmp_path / "4.parquet", text=["4"]),
        write_text(tmp_path / "5.txt", "5"),
        write_jsonl(tmp_path / "6.jsonl", '{"text": "6"}'),
    ]
    Path(urls[2]).write_bytes(gzip.compress(b"3"))
    result, texts = run(tmp_path / "out", sources(*urls), valid_fraction=0)
    assert texts["train"] == f"1{EOT}2{EOT}\n3{EOT}4{EOT}5{EOT}6{EOT}"
    assert [(text["file"], text["source"]) for text in result["train"]] == [
        *[("0/text.txt", None), (None, 1), ("0/text-2.txt", None), (None, 4), ("0/text-3.txt", None)],
    ]
    assert result["valid"] == []
    assert result["statistics"]["train"]["documents"] == 6
    assert written_files(tmp_path / "out") == ["0/text-2.txt", "0/text-3.txt", "0/text.txt"]


def test_a_plain_file_with_replaced_bytes_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.txt").write_bytes(b"a\xffb")
    bad, good = sources(tmp_path / "bad.txt", write_text(tmp_path / "good.txt", "good"))
    result, texts = run(tmp_path / "out", [bad, good], valid_fraction=0, invalid_utf8="replace")
    assert [text["source"] for text in result["train"]] == [None, 1]
    assert texts["train"] == f"a\ufffdb{EOT}good{EOT}"
    assert result["statistics"]["train"]["replaced"] == 1
    assert result["statistics"]["train"]["documents"] == 2
    assert "replaced 1 invalid UTF-8 sequences" in caplog.text
    with pytest.raises(UserError, match="offset 1"):
        run(tmp_path / "again", [bad], valid_fraction=0)


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "a.txt": lambda path, document: write_text(path, f"one{EOT}{document}"),
    "a.jsonl": lambda path, document: write_jsonl(path, json.dumps({"text": document})),
    "a.parquet": lambda path, document: write_parquet(path, text=[document]),
    "a.txt.gz": lambda path, document: path.write_bytes(gzip.compress(document.encode())),
    "a.txt.bz2": lambda path, document: path.write_bytes(bz2.compress(document.encode()) + bytes(2_000_000)),
    "a.jsonl.xz": lambda path, document: path.write_bytes(lzma.compress(json.dumps({"text": document}).encode())),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("later", ["thr", "two and three"], ids=["of the same size", "longer"])
def test_a_source_that_changed_after_hashing_raises_a_user_error(tmp_path: Path, name: str, later: str) -> None:
    WRITERS[name](tmp_path / name, "two")
    given_sources = sources(tmp_path / name)
    assert run(tmp_path / "same", given_sources, valid_fraction=0)[1]["train"].endswith(f"two{EOT}")
    WRITERS[name](tmp_path / name, later)
    with pytest.raises(UserError, match=rf"{name} changed while the pipeline ran; run it again"):
        run(tmp_path / "out", given_sources, valid_fraction=0)


def test_sources_without_a_document_raise_a_user_error(tmp_path: Path) -> None:
    url = write_jsonl(tmp_path / "a.jsonl", "", "")
    with pytest.raises(UserError, match="no text"):
        run(tmp_path / "out", sources(url), valid_fraction=0)


def test_removed_separators_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = write_jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": f"{row}{EOT}{row}"}) for row in "abcdefgh" * 5))
    for name, fraction in (("split", 0.4), ("whole", 0)):
        result, _ = run(tmp_path / name, sources(url), valid_fraction=fraction, separator_in_document="remove")
        assert result["statistics"]["train"]["separators_removed"] == 40
    assert "removed 40 separators" in caplog.text


def test_invalid_input_raises_a_user_error(tmp_path: Path) -> None:
    good = write_text(tmp_path / "good.txt", f"a{EOT}b{EOT}")
    bad = write_jsonl(tmp_path / "bad.jsonl", "{")
    for fraction in (0, 0.5):
        with pytest.raises(UserError, match="line 1: not JSON"):
            run(tmp_path / f"out-{fraction}", sources(good, bad), valid_fraction=fraction)


def test_plain_text_in_a_bucket_is_read_in_place(bucket: Any, tmp_path: Path) -> None:
    stories = "".join(demo_stories(200))
    bucket.pipe_file("corpus/a.txt", stories.encode())
    bucket.pipe_file("corpus/b.txt.gz", gzip.compress(stories.encode()))
    write_text(tmp_path / "a.txt", stories)
    config = DataConfig(valid_fraction=0.1)
    remote_sources, local_sources = sources("s3://corpus/a.txt"), sources(tmp_path / "a.txt")
    remote = ingest_sources(remote_sources, [], config, tmp_path / "remote")
    local = ingest_sources(local_sources, [], config, tmp_path / "local")
    assert remote == local
    assert [text["source"] for text in remote["train"]] == [0], "only the validation text is copied"
    assert (tmp_path / "remote/0/held-out.txt").read_bytes() == (tmp_path / "local/0/held-out.txt").read_bytes()
    ranges = [[tuple(ends) for ends in text["ranges"]] for text in remote["train"]]
    chunks = [
        list(cut_chunks([place], [EOT], 5_000, ranges=ranges))
        for place in ("s3://corpus/a.txt", str(tmp_path / "a.txt"))
    ]
    assert chunks[0] == chunks[1]
    assert len(chunks[0]) > 5
    copied = ingest_sources(sources("s3://corpus/b.txt.gz"), [], DataConfig(valid_fraction=0), tmp_path / "copied")
    assert [text["file"] for text in copied["train"]] == ["0/text.txt"]


@pytest.mark.parametrize("place", ["s3://corpus", "local", "memory://marked"])
def test_plain_text_with_a_byte_order_mark_is_copied_without_it(bucket: Any, tmp_path: Path, place: str) -> None:
    place = str(tmp_path) if place == "local" else place
    fs, path = open_filesystem(place)
    fs.pipe_file(f"{path}/marked.txt", f"\ufeffa{EOT}b{EOT}".encode())
    fs.pipe_file(f"{path}/plain.txt", f"a\ufeff{EOT}b{EOT}".encode())
    given = sources(f"{place}/marked.txt", f"{place}/plain.txt")
    result = ingest_sources(given, [], DataConfig(valid_fraction=0), tmp_path / "out")
    assert [(text["file"], text["source"]) for text in result["train"]] == [("0/text.txt", None), (None, 1)]
    assert (tmp_path / "out/0/text.txt").read_text() == f"a{EOT}b{EOT}"


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves ``DATA`` with byte ranges below /ranged, and without them elsewhere."""

    DATA = "".join(demo_stories(50)).encode()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(b"", 200)

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        if wanted and self.path.startswith("/ranged"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            self._answer(self.DATA[int(start) : int(end or len(self.DATA)) + 1], 206)
        else:
            self._answer(self.DATA, 200)

    def _answer(self, body: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if body else len(self.DATA)))
        if self.path.startswith("/ranged"):
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(body)


def test_plain_text_of_a_web_server_with_byte_ranges_is_read_in_place(tmp_path: Path) -> None:
    with serve_http(RangeHandler) as url:
        results = {}
        for name in ("ranged", "whole"):
            results[name] = ingest_sources(
                sources(f"{url}/{name}.txt"), [], DataConfig(valid_fraction=0), tmp_path / name
            )
        assert [text["file"] for text in results["ranged"]["train"]] == [None]
        assert [text["file"] for text in results["whole"]["train"]] == ["0/text.txt"]
        (remote, local) = (
            list(cut_chunks([place], [EOT], 2_000))
            for place in (f"{url}/ranged.txt", str(tmp_path / "whole/0/text.txt"))
        )
        assert remote == local
        with open_ranges(f"{url}/ranged.txt", [(10, 20), (500, 700)]) as blocks:
            assert b"".join(blocks) == RangeHandler.DATA[10:20] + RangeHandler.DATA[500:700]
