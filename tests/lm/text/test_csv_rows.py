"""Rows of CSV: equal to those written, with any separator, and errors that name the line."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.csv_rows import read_csv
from lm.text.rows import DamagedRows, read_rows
from tests.helpers.examples import examples

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


def split(data: bytes) -> list[tuple[int, bytes | None]]:
    return [(len(line), line) for line in data.split(b"\n")]


@examples(300)
@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5),
    st.sampled_from(",;\t"),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\ufeff"]),
)
def test_rows_are_those_that_were_written(
    rows: list[tuple[str, str, str]], separator: str, line_break: str, start: str
) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator, lineterminator=line_break, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b", "c"), *rows])
    read = [load() for _, load in read_csv(split((start + file.getvalue()).encode()), "a.csv", 1000)]
    assert read == [dict(zip("abc", (cell or None for cell in row), strict=True)) for row in rows]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "A.CSV", "a.csv.gz"])
def test_files(tmp_path: Path, name: str) -> None:
    separator = "\t" if name.endswith("tsv") else ","
    text = f'\ufeffprompt{separator}response\nHi.{separator}"Ho,\t\r\nand ""so"" on"\n\n日本{separator}\n'.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    expected = [{"prompt": "Hi.", "response": 'Ho,\t\r\nand "so" on'}, {"prompt": "日本", "response": None}]
    assert list(read_rows(str(path), DamagedRows(), dict)) == expected


def test_a_row_with_too_many_or_too_few_cells_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,"x\ny"\n1,2,3\n1\n4,5\n')
    damaged = DamagedRows()
    assert [row["a"] for row in read_rows(str(path), damaged, dict)] == ["1", "4"]
    assert [name.removeprefix(f"{path}, ") for name in damaged.names] == [
        "line 4: it has 3 cells, the header 2; put a cell with a separator in quotes",
        "line 5: it has 1 cells, the header 2; put a cell with a separator in quotes",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'a,b\n1,2\n"1,2\n3,4\n', r"a\.csv, line 3: not CSV: unexpected end of data"),
        (b'a,b\n"1"x,2\n', "line 2: not CSV: ',' expected after '\"'"),
        (b"a,b\n1,caf\xe9\n", r"line 2: not UTF-8: byte 0xe9 at offset 5\. Convert the file: iconv"),
        (b"a,b,a\n1,2,3\n", "line 1: the header has the name 'a' twice; rename a column"),
        (b"a,b\n", "has no rows"),
        (b"\n", "has no rows"),
    ],
    ids=range(6),
)
def test_errors_name_the_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        list(read_rows(str(path), DamagedRows(), dict))


@examples(300)
@given(st.binary(max_size=60))
def test_any_bytes_are_rows_or_an_error_that_names_the_line(data: bytes) -> None:
    rows: list[Any] = []
    try:
        for name, load in read_csv(split(b"a,b\n" + data), "a.csv", 1000):
            assert name.startswith("a.csv, line ")
            try:
                rows.append(load())
            except ValueError as error:
                assert "cells, the header 2" in str(error)
    except UserError as error:
        assert str(error).startswith("a.csv, line ")
    assert json.dumps(rows) and all(row.keys() == {"a", "b"} for row in rows)
