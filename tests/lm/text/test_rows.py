"""Rows of files, and what happens to damaged ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text import rows
from lm.text.rows import DamagedRows, Row, read_rows
from tests.helpers.examples import examples


def keep(row: Row) -> Row:
    return row


def needs_a(row: Row) -> Any:
    if "a" not in row:
        raise ValueError("no a")
    return row["a"]


def read(url: str | Path, damaged: DamagedRows | None = None) -> list[Any]:
    return list(read_rows(str(url), damaged or DamagedRows(), needs_a))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.parquet"])
def test_formats(tmp_path: Path, name: str) -> None:
    rows = [{"a": "x\u2028y", "b": [{"c": 1}]}, {"a": "日本", "b": []}]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n\n  \n"
        text = b"\xef\xbb\xbf" + text if name.endswith(".json") else text  # as some programs on Windows begin a file
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert list(read_rows(str(path), DamagedRows(), keep)) == rows


def test_urls() -> None:
    fsspec.filesystem("memory").pipe("/rows.jsonl", b'{"a": 1}\n{"a": 2}')
    assert read("memory://rows.jsonl") == [1, 2]


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'{"a": 1}', b"{", b"[1]", b'{"b": 1}', b'{"a": "\xff"}', b"", b'{"a": 2}', b"[" * 100_000, b'"a"']
    path.write_bytes(b"\n".join(lines))
    damaged = DamagedRows()
    assert read(path, damaged) == [1, 2]
    assert damaged.count == 6
    reasons = dict(name.removeprefix(f"{path}, ").split(": ", 1) for name in damaged.names)
    assert reasons["line 2"].startswith("not JSON: Expecting property name")
    assert reasons["line 8"].startswith("not JSON: maximum recursion depth")
    assert {name: reasons[f"line {name}"] for name in (3, 4, 5, 9)} == {
        3: "not a JSON object",
        4: "no a",
        5: "not UTF-8: byte 0xff at offset 7",
        9: "not a JSON object",
    }
    assert str(damaged).startswith(f"6 damaged rows were skipped: {path}, line 2: ") and str(damaged).endswith("; …")


def test_many_damaged_rows_are_counted_and_some_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' + "x\n" * 500)
    damaged = DamagedRows()
    assert read(path, damaged) == [1]
    assert damaged.count == 500 and len(damaged.names) == 100


def test_a_file_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    good, bad, empty = (tmp_path / f"{name}.jsonl" for name in ("good", "bad", "empty"))
    good.write_text('{"a": 1}')
    bad.write_text("x\n{}\n")
    empty.write_text("\n\n")
    damaged = DamagedRows()
    read(good, damaged)
    with pytest.raises(UserError, match=r"bad\.jsonl has no usable row\. 2 damaged rows were skipped: .*line 2: no a"):
        read(bad, damaged)
    with pytest.raises(UserError, match=r"empty\.jsonl has no rows"):
        read(empty)
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "missing.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(tmp_path / "bad.parquet")


def test_invalid_utf8_in_parquet_damages_one_row(tmp_path: Path) -> None:
    data = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    texts = pa.StringArray.from_buffers(3, data.buffers()[1], data.buffers()[2])
    pq.write_table(pa.table({"a": texts}), tmp_path / "rows.parquet")
    damaged = DamagedRows()
    assert read(tmp_path / "rows.parquet", damaged) == ["good", "fine"]
    assert len(damaged.names) == 1 and "rows.parquet, row 2: not UTF-8" in damaged.names[0]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"a": ["\ud83d", {"\uD83D\uDE42": "\udc00x", "n": 1}]}')
    assert read(path) == [["\ufffd", {"🙂": "\ufffdx", "n": 1}]]


def test_a_long_line_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * (3 << 20) + b'"}\n{"a": 2}\n')
    damaged = DamagedRows()
    assert read(path, damaged) == [1, 2]
    assert damaged.names == [f"{path}, line 2: longer than 1 MiB"]


@examples(200)
@given(st.lists(st.binary(max_size=8), max_size=8), st.integers(0, 6))
def test_lines_are_those_of_the_joined_blocks(blocks: list[bytes], limit: int) -> None:
    lines = b"".join(blocks).split(b"\n")
    expected = [(len(line), line if len(line) <= limit else None) for line in lines]
    assert list(rows._split_lines(blocks, limit)) == expected
