"""Files that are not what their names say, and texts that begin like another format."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.rows import DamagedRows, read_rows
from tests.helpers.corpora import COMPRESSIONS, EOT, read_documents, write_parquet, write_text
from tests.helpers.ingesting import run, sources

ROWS = '{"text": "one\\ntwo", "url": "x"}\n{"text": "three"}\n'


@pytest.mark.parametrize("name", ["c4.json", "c4-train.00000-of-01024.json.gz", "a.JSON.zst", "a.ndjson.xz"])
def test_json_files_are_json_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(COMPRESSIONS[path.suffix if path.suffix in COMPRESSIONS else ""](ROWS.encode()))
    assert read_documents(str(path)) == [f"one\ntwo{EOT}", f"three{EOT}"]


@pytest.mark.parametrize("text", ['[{"text": "a"},\n{"text": "b"}]', '\ufeff \n[\n  {\n "text": "a"}\n]', "[]"])
def test_a_json_array_is_called_one(tmp_path: Path, text: str) -> None:
    path = write_text(tmp_path / "alpaca.json", text)
    with pytest.raises(UserError, match=r"alpaca\.json begins with a JSON array, .* Write one object a line"):
        read_documents(str(path))


def test_an_indented_object_is_told_to_be_on_one_line(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.json", json.dumps({"text": "a"}, indent=1))
    with pytest.raises(UserError, match=r"a\.json, line 1: not JSON: .* JSON Lines have one object a line"):
        read_documents(str(path))


def test_a_long_number_is_json(tmp_path: Path) -> None:
    row = f'{{"text": "a", "id": {"7" * 5000}, "answer": -{"1" * 4400}, "small": 12}}\n'
    path = write_text(tmp_path / "a.jsonl", row)
    assert read_documents(str(path)) == [f"a{EOT}"]
    assert [row["small"] for row in read_rows(str(path), DamagedRows(), dict)] == [12]


@pytest.mark.parametrize("invalid_utf8", ["error", "replace"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("hello, world".encode("utf-16"), "UTF-16"),
        ("hello, world".encode("utf-16-be"), "UTF-16"),
        ("hello, world".encode("utf-16-le"), "UTF-16"),
        ("hello, world".encode("utf-32"), "UTF-16 or UTF-32"),
        (gzip.compress(b"hello", mtime=0), r"compressed by gzip; add \.gz"),
        (COMPRESSIONS[".zst"](b"hello"), r"compressed by zstd; add \.zst"),
        (COMPRESSIONS[".bz2"](b"hello"), r"compressed by bzip2; add \.bz2"),
        (COMPRESSIONS[".xz"](b"hello"), r"compressed by xz; add \.xz"),
        (b"PAR1\x15\x00", r"a Parquet file; name it \.parquet"),
        (b"%PDF-1.7\n", "a PDF; extract its text"),
        (b"PK\x03\x04\x14\x00", "a zip archive"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_a_binary_file_is_refused_by_its_first_bytes(
    tmp_path: Path, name: str, data: bytes, message: str, invalid_utf8: str
) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match=message):
        read_documents(str(path), DataConfig(invalid_utf8=invalid_utf8))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["BZh is no signature alone", "a\0b", "PARIS", "\0" * 20, "naïve", "[1] See below."])
def test_other_texts_are_not_refused(tmp_path: Path, text: str) -> None:
    assert read_documents(str(write_text(tmp_path / "a.txt", text))) == [text + EOT]


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("x.txt", ROWS, "JSON"),
        ("x.jsonl.zstd", ROWS, "JSON"),
        ("x.txt", '[\n {"text": "a b"}]', "JSON"),
        ("x.txt", "<!DOCTYPE html>\n<p>a b", "HTML or XML"),
        ("x", "<?xml version='1.0'?> a", "HTML or XML"),
        ("x.csv", "text,label\na b,1\n", "CSV"),
    ],
)
def test_a_text_that_looks_like_another_format_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str, kind: str
) -> None:
    one, other = (
        write_text(tmp_path / name, text),
        write_text(tmp_path / "prose.txt", "It says {no} [more] than <that>."),
    )
    run(tmp_path / "out", sources(one, other), valid_fraction=0)
    start = f"Read as plain text, markup included, though it looks like {kind}: {one}. For one document a row, give "
    messages = [message for message in caplog.messages if "looks like" in message]
    assert len(messages) == 1 and messages[0].startswith(start)


def test_a_column_with_a_point_in_its_name_is_read_beside_a_struct(tmp_path: Path) -> None:
    table = pa.table({"data": [{"text": "struct", "id": 1}], "data.text": ["column"], "data.text.more": ["other"]})
    pq.write_table(table, tmp_path / "a.parquet")
    config = DataConfig(text_field="data.text")
    assert read_documents(str(tmp_path / "a.parquet"), config) == [f"column{EOT}"]


def test_a_column_without_a_value_has_no_document(tmp_path: Path) -> None:
    assert read_documents(write_parquet(tmp_path / "a.parquet", text=pa.nulls(3))) == []
    empty = pa.DictionaryArray.from_arrays(pa.array([None, None], pa.int32()), pa.nulls(0))
    assert read_documents(write_parquet(tmp_path / "b.parquet", text=empty)) == []
