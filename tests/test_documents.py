"""Documents of text, JSON lines and Parquet: their separators, their fields, and what users get wrong."""

import json
import math
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.corpus import DataConfig, Tally, pieces
from lm.errors import UserError
from tests.corpora import EOT, jsonl, parquet, read


@settings(deadline=None, max_examples=300)
@given(st.text("ab| \n", max_size=60), st.sampled_from(["|", "||", "a|", "aa", "ab|", "\n\n"]), st.integers(1, 9))
def test_documents_of_a_text_join_to_it_and_a_last_separator(text: str, separator: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.corpus.BLOCK", block)
        fsspec.filesystem("memory").pipe("/hypothesis.txt", text.encode())
        tally = Tally()
        found = read("memory://hypothesis.txt", DataConfig(separator=separator), tally)
    *whole, rest = text.split(separator)
    expected = [document + separator for document in whole]
    if rest:
        expected.append(rest if rest.isspace() else rest + separator)
    assert found == expected
    assert tally.documents == len(whole) + bool(rest.strip())


def test_a_long_document_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.corpus.BLOCK", 100)
    path = tmp_path / "a.txt"
    path.write_text("word " * 1000)
    tally = Tally()
    found = list(pieces(str(path), DataConfig(), tally))
    assert max(map(len, found)) < 200
    assert "".join(found) == "word " * 1000 + EOT
    assert tally.documents == 1
    assert tally.lengths[int(4 * math.log2(5000))] == 1


def test_a_text_without_a_separator_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("no separator")
    tally = Tally()
    assert read(str(path), tally=tally) == [f"no separator{EOT}"]
    assert tally.documents == 1


def test_white_space_after_the_last_separator_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"one{EOT}\r\ntwo{EOT}\r\n \n".encode())
    tally = Tally()
    assert read(str(path), tally=tally) == [f"one{EOT}", f"\r\ntwo{EOT}", "\r\n \n"]
    assert tally.documents == 2


def test_jsonl_documents(tmp_path: Path) -> None:
    rows = ["one", "", "two\nlines\u2028 and \u0085", "日本"]
    lines = [json.dumps({"text": row, "more": 1}, ensure_ascii=False) for row in rows]
    tally = Tally()
    found = read(jsonl(tmp_path / "a.jsonl", *lines, "", "  "), tally=tally)
    assert found == [row + EOT for row in rows]
    assert tally.documents == 4
    assert read(jsonl(tmp_path / "b.jsonl", '{"body": "x"}'), DataConfig(text_field="body")) == [f"x{EOT}"]
    assert read(jsonl(tmp_path / "c.ndjson", r'{"text": "\ud83d\ude42 \ud83d"}')) == [f"🙂 \ufffd{EOT}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("plain text", "not JSON"),
        ('{"body": "x"}', "no text field 'text'; set data.text_field"),
        ('{"text": 5}', "no text field"),
        ('{"text": null}', "no text field"),
        ("[]", "no text field"),
        ('"text"', "no text field"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    url = jsonl(tmp_path / "a.jsonl", '{"text": "good"}', "", line, '{"text": "good"}')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: {message}"):
        read(url)


def test_parquet_documents(tmp_path: Path) -> None:
    url = parquet(tmp_path / "a.parquet", text=["one", None, "", "日本"], more=[1, 2, 3, 4])
    tally = Tally()
    assert read(url, tally=tally) == [f"one{EOT}", EOT, f"日本{EOT}"]
    assert tally.documents == 3
    url = parquet(tmp_path / "b.parquet", body=pa.array(["x"] * 3000, pa.large_string()))
    assert read(url, DataConfig(text_field="body")) == [f"x{EOT}"] * 3000


def test_a_parquet_file_without_the_column_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text' among \['body'\]; set data.text_field"):
        read(parquet(tmp_path / "a.parquet", body=["x"]))
    with pytest.raises(UserError, match="column 'text' is not text"):
        read(parquet(tmp_path / "a.parquet", text=[1]))


def test_a_file_that_is_not_parquet_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"text" * 100)
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(str(path))
    whole = Path(parquet(tmp_path / "b.parquet", text=["x" * 100])).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(str(path))


def test_parquet_text_that_is_not_utf8_is_a_users_mistake(tmp_path: Path) -> None:
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0]))
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(parquet(tmp_path / "a.parquet", text=text))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_separator_inside_a_document_is_named_or_removed(tmp_path: Path, kind: str) -> None:
    rows = ["good", f"a{EOT}b{EOT}c", f"nested <|endof{EOT}text|> end"]
    if kind == "jsonl":
        url = jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": row}) for row in rows))
    else:
        url = parquet(tmp_path / "a.parquet", text=rows)
    with pytest.raises(UserError, match=r"(line|row) 2: the document contains the separator <\|endoftext\|>"):
        read(url)
    tally = Tally()
    found = read(url, DataConfig(separator_in_document="remove"), tally)
    assert found == [f"good{EOT}", f"abc{EOT}", f"nested  end{EOT}"]
    assert tally.separators_removed == 4


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
def test_an_unfit_config_is_a_users_mistake(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)
