"""Documents of plain text, JSON Lines and Parquet: separators, fields and errors."""

import gzip
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.documents import TextStatistics, _remove_separators, stream_documents
from tests.helpers.corpora import EOT, read_documents, write_jsonl, write_parquet
from tests.helpers.examples import examples


@examples(300)
@given(st.text("ab| \n", max_size=60), st.sampled_from(["|", "||", "a|", "aa", "ab|", "\n\n"]), st.integers(1, 9))
def test_documents_join_to_the_text_and_a_final_separator(text: str, separator: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.files.compression.BLOCK_BYTES", block)
        fsspec.filesystem("memory").pipe("/hypothesis.txt", text.encode())
        statistics = TextStatistics()
        documents = read_documents("memory://hypothesis.txt", DataConfig(separator=separator), statistics)
    *whole, rest = text.split(separator)
    expected = [document + separator for document in whole]
    if rest:
        expected.append(rest if rest.isspace() else rest + separator)
    assert documents == expected
    assert statistics.documents == len(whole) + bool(rest.strip())


def test_a_long_document_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.files.compression.BLOCK_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("word " * 1000)
    statistics = TextStatistics()
    pieces = list(stream_documents(str(path), DataConfig(), statistics))
    assert max(map(len, pieces)) < 200
    assert "".join(pieces) == "word " * 1000 + EOT
    assert statistics.documents == 1
    assert statistics.lengths[int(4 * math.log2(5000))] == 1


def test_a_text_without_a_separator_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("no separator")
    statistics = TextStatistics()
    assert read_documents(str(path), statistics=statistics) == [f"no separator{EOT}"]
    assert statistics.documents == 1


def test_white_space_after_the_last_separator_is_not_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"one{EOT}\r\ntwo{EOT}\r\n \n".encode())
    statistics = TextStatistics()
    assert read_documents(str(path), statistics=statistics) == [f"one{EOT}", f"\r\ntwo{EOT}", "\r\n \n"]
    assert statistics.documents == 2


def test_jsonl_documents(tmp_path: Path) -> None:
    rows = ["one", "", "two\nlines\u2028 and \u0085", "日本"]
    lines = [json.dumps({"text": row, "more": 1}, ensure_ascii=False) for row in rows]
    statistics = TextStatistics()
    documents = read_documents(write_jsonl(tmp_path / "a.jsonl", *lines, "", "  "), statistics=statistics)
    assert documents == [row + EOT for row in rows]
    assert statistics.documents == 4
    assert read_documents(write_jsonl(tmp_path / "b.jsonl", '{"body": "x"}'), DataConfig(text_field="body")) == [
        f"x{EOT}"
    ]
    assert read_documents(write_jsonl(tmp_path / "e.jsonl", '{"text": null}', '{"text": "x"}')) == [f"x{EOT}"]
    assert read_documents(write_jsonl(tmp_path / "d.jsonl", '\ufeff{"text": "x"}')) == [f"x{EOT}"]
    assert read_documents(write_jsonl(tmp_path / "c.ndjson", r'{"text": "\ud83d\ude42 \ud83d"}')) == [f"🙂 \ufffd{EOT}"]


def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path: Path) -> None:
    for text in (f"one{EOT}\ufefftwo{EOT}", "one", " one"):
        (tmp_path / "a.txt").write_text(f"\ufeff{text}")
        (tmp_path / "b.txt").write_text(text)
        marked, plain = TextStatistics(), TextStatistics()
        documents = read_documents(str(tmp_path / "a.txt"), statistics=marked)
        assert documents == read_documents(str(tmp_path / "b.txt"), statistics=plain)
        assert marked == plain
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfone"))
    assert read_documents(str(tmp_path / "c.txt.gz")) == [f"one{EOT}"]
    (tmp_path / "only.txt").write_text("\ufeff")
    assert read_documents(str(tmp_path / "only.txt")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("plain text", "not JSON"),
        ('{"body": "x"}', "no text field 'text'; set data.text_field"),
        ('{"text": 5}', "no text field"),
        ("[]", "no text field"),
        ('"text"', "no text field"),
    ],
)
def test_an_invalid_jsonl_line_is_reported_by_number(tmp_path: Path, line: str, message: str) -> None:
    url = write_jsonl(tmp_path / "a.jsonl", '{"text": "good"}', "", line, '{"text": "good"}')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: {message}"):
        read_documents(url)


def test_parquet_documents(tmp_path: Path) -> None:
    url = write_parquet(tmp_path / "a.parquet", text=["one", None, "", "日本"], more=[1, 2, 3, 4])
    statistics = TextStatistics()
    assert read_documents(url, statistics=statistics) == [f"one{EOT}", EOT, f"日本{EOT}"]
    assert statistics.documents == 3
    url = write_parquet(tmp_path / "b.parquet", body=pa.array(["x"] * 3000, pa.large_string()))
    assert read_documents(url, DataConfig(text_field="body")) == [f"x{EOT}"] * 3000


def test_a_parquet_file_without_the_text_column_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text' among \['body'\]; set data.text_field"):
        read_documents(write_parquet(tmp_path / "a.parquet", body=["x"]))
    twice = pa.table([["a"], ["b"]], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: several columns are called 'text'; rename all but one"):
        read_documents(str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match="column 'text' is not text"):
        read_documents(write_parquet(tmp_path / "a.parquet", text=[1]))


def test_a_damaged_parquet_file_raises_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"text" * 100)
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read_documents(str(path))
    whole = Path(write_parquet(tmp_path / "b.parquet", text=["x" * 100])).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read_documents(str(path))


def test_invalid_utf8_in_parquet_raises_a_user_error_or_is_replaced(tmp_path: Path) -> None:
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0]))
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"a\xff")])
    url = write_parquet(tmp_path / "a.parquet", text=text)
    with pytest.raises(UserError, match=r"a\.parquet, row 1, is not UTF-8: byte 0xff at offset 1"):
        read_documents(url)
    statistics = TextStatistics()
    assert read_documents(url, DataConfig(invalid_utf8="replace"), statistics) == [f"a\ufffd{EOT}"]
    assert statistics.replaced == 1


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_every_arrow_type_of_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    text = pa.array(["a", None, "日本", "a"]).cast(kind)
    assert read_documents(write_parquet(tmp_path / "a.parquet", text=text)) == [f"a{EOT}", f"日本{EOT}", f"a{EOT}"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_separator_inside_a_document_is_reported_or_removed(tmp_path: Path, kind: str) -> None:
    rows = ["good", f"a{EOT}b{EOT}c", f"nested <|endof{EOT}text|> end"]
    if kind == "jsonl":
        url = write_jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": row}) for row in rows))
    else:
        url = write_parquet(tmp_path / "a.parquet", text=rows)
    with pytest.raises(UserError, match=r"(line|row) 2: the document contains the separator <\|endoftext\|>"):
        read_documents(url)
    statistics = TextStatistics()
    documents = read_documents(url, DataConfig(separator_in_document="remove"), statistics)
    assert documents == [f"good{EOT}", f"abc{EOT}", f"nested  end{EOT}"]
    assert statistics.separators_removed == 4


@pytest.mark.parametrize("nested", ["<|endof" * 40_000 + "text|>" * 40_000, f"a{EOT}b" * 40_000])
def test_removing_separators_takes_linear_time(tmp_path: Path, nested: str) -> None:
    url = write_jsonl(tmp_path / "a.jsonl", json.dumps({"text": nested}))
    statistics = TextStatistics()
    start = time.process_time()
    documents = read_documents(url, DataConfig(separator_in_document="remove"), statistics)
    assert time.process_time() - start < 5, "a pass for each level takes more than 20 s"
    assert documents == [nested.replace(EOT, "").replace("<|endof", "").replace("text|>", "") + EOT]
    assert statistics.separators_removed == 40_000


@examples(300)
@given(st.text("abé ", max_size=40), st.sampled_from(["ab", "aab", "éa", "abé", "a"]))
def test_separators_are_removed_until_none_is_left(document: str, separator: str) -> None:
    expected, count = document, 0
    while separator in expected:
        count += expected.count(separator)
        expected = expected.replace(separator, "")
    assert _remove_separators(document, separator) == (expected, count)


@given(
    documents=st.lists(st.text("ab#", max_size=8), min_size=1, max_size=5),
    separator=st.sampled_from(["##", "aba", "abab", "a", "#a#a#"]),
)
def test_a_separator_that_overlaps_itself_is_removed_at_the_end_of_a_document(
    documents: list[str], separator: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = write_jsonl(Path(folder, "a.jsonl"), *(json.dumps({"text": document}) for document in documents))
        statistics, config = TextStatistics(), DataConfig(separator=separator, separator_in_document="remove")
        text = "".join(read_documents(url, config, statistics))
        *read, rest = text.split(separator)
        assert (len(read), rest) == (len(documents), "")
        for before, after in zip(documents, read, strict=True):
            if (before + separator).split(separator) == [before, ""]:
                assert after == before
        if read != documents:
            assert statistics.separators_removed
            with pytest.raises(UserError, match="the document contains the separator"):
                read_documents(url, DataConfig(separator=separator))
        else:
            assert read_documents(url, DataConfig(separator=separator)) == [d + separator for d in documents]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": []}, "data.train is empty"),
        ({"separator": ""}, "data.separator is empty"),
        ({"valid_fraction": 1.0}, "data.valid_fraction is 1.0"),
        ({"valid_fraction": -0.1}, "data.valid_fraction"),
        ({"valid_fraction": float("nan")}, "data.valid_fraction"),
    ],
)
def test_an_invalid_config_raises_a_user_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("lm.text.config", {"numba", "numpy", "pyarrow", "fsspec", "torch", "aiohttp"}),
        ("lm.text.sources", {"numba", "numpy", "pyarrow", "torch", "aiohttp"}),
        ("lm.text.chunks", {"numba", "numpy", "pyarrow", "torch", "aiohttp"}),
    ],
)
def test_an_import_loads_no_slow_library(module: str, absent: set[str]) -> None:
    """The command line imports the config at startup, and ``plan`` imports the sources."""
    code = f"import {module}, sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = process.stdout.split()
    assert module in loaded
    assert not absent.intersection(loaded)
