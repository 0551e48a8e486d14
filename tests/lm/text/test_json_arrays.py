"""JSON arrays read value by value: equal to a read of the whole file, and errors that name the row."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text import rows
from lm.text.json_arrays import split_json_array
from lm.text.rows import DamagedRows, read_rows
from tests.helpers.examples import examples

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Return the pieces of a text that is cut at these places."""
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@examples(300)
@given(
    st.lists(VALUES, max_size=5),
    st.lists(st.integers(0, 1000), max_size=8),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.sampled_from(["", "\ufeff", " \n"]),
)
def test_values_in_any_blocks_are_those_of_the_whole_array(
    values: list[Any], places: list[int], indent: int | None, ascii_only: bool, start: str
) -> None:
    text = start + json.dumps(values, indent=indent, ensure_ascii=ascii_only) + "\n"
    read = [*split_json_array(cut(text.encode(), places), "a.json", 1 << 20)]
    assert [value for value, _ in read] == values
    assert [json.loads(text) for _, text in read] == values


@examples(300)
@given(st.binary(max_size=30), st.lists(st.integers(0, 100), max_size=4))
def test_damaged_arrays_are_refused_as_by_a_read_of_the_whole_file(data: bytes, places: list[int]) -> None:
    data = b"[" + data
    try:
        expected: Any = json.loads(data.decode())
    except ValueError:
        expected = UserError
    try:
        read: Any = [value for value, _ in split_json_array(cut(data, places), "a.json", 1000)]
    except UserError as error:
        assert str(error).startswith("a.json, row ")
        read = UserError
    assert repr(read) == repr(expected)  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": }]', r"a\.json, row 2: not JSON: Expecting value at character 6 of the value\. Repair"),
        ('[{"a": 1} {"a": 2}]', r"row 1: '{' follows the value; ',' must come next"),
        ('[{"a": 1},', "row 2: not JSON: Expecting value at character 0 of the value"),
        ('[{"a": 1}', "row 1: the file ends within the array"),
        ('[{"a": 1}]\n[{"a": 2}]', "row 1: text follows the end of the array; a file is one array, or has one object"),
        ('[{"a": 1}, {"a": "' + "x" * 2000 + '"}]', "row 2: the value is longer than 1,000 characters"),
        ('[{"a": ' + "[" * 100_000, "row 1: not JSON: maximum recursion depth"),
        ("[]", "has no rows"),
    ],
    ids=range(8),
)
def test_errors_name_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setattr(rows, "_MAX_ROW_BYTES", 1000)
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        list(read_rows(str(path), DamagedRows(), dict))


def test_a_value_that_is_no_object_is_a_damaged_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'[{{"a": "\\ud83d"}}, 5, {{"a": {"7" * 5000}}}]')
    damaged = DamagedRows()
    assert list(read_rows(str(path), damaged, dict)) == [{"a": "\ufffd"}, {"a": float("inf")}]
    assert damaged.names == [f"{path}, row 2: not a JSON object"]


def test_bytes_that_are_not_utf8_are_refused_with_their_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1}, {"a": "\xff"}]')
    with pytest.raises(UserError, match=r"a\.json, row 1: the text after it is not UTF-8: byte 0xff"):
        list(read_rows(str(path), DamagedRows(), dict))
