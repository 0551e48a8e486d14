"""Metadata of documents stay in step with the text: also of those held out, and across formats."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from lm.text.document_metadata import DocumentMetadata, DocumentRows, MetadataTables, read_metadata
from tests.helpers.examples import examples


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=20))
@examples(50)
def test_documents_held_out_are_found_in_their_copy(documents: list[tuple[int, int, bool]]) -> None:
    """Each document has a size, blank text before it, and may be held out, with the blank text."""
    rows, held_out, expected, end, copied = DocumentRows(), [], [], 0, 100
    for number, (size, blank, is_held_out) in enumerate(documents):
        start, end = end, end + blank + size
        rows.add(number, end - size, end, DocumentMetadata(url=f"u{number}"))
        if is_held_out:
            held_out.append((start, end))
            copied += blank + size
            expected.append(("held-out.txt", copied - size, copied, number, f"u{number}"))
        else:
            expected.append(("text.txt", end - size, end, number, f"u{number}"))
    tables = MetadataTables()
    tables.add_split("text.txt", rows, held_out, "held-out.txt", 100)
    found = [row for table in tables._tables for row in table.to_pylist()]
    names = ("text", "start", "end", "source", "url")
    assert sorted(tuple(row[name] for name in names) for row in found) == sorted(expected)


def test_rows_of_ranges_are_those_of_the_documents_in_them(tmp_path: Path) -> None:
    rows, tables, ends = DocumentRows(), MetadataTables(), np.arange(10, 50_001, 10)
    for number, end in enumerate(ends.tolist()):
        rows.add(0, end - 10, end, DocumentMetadata(url=str(number)))
    assert len(rows) == 5000
    tables.add_split("text.txt", rows, [(0, 10), (30, 40)], "held-out.txt", 0)
    tables.write(path := tmp_path / "metadata.parquet")
    assert pq.read_table(path).column_names == [
        *("text", "start", "end", "source", "url", "date", "language", "licence"),
    ]
    ranges = [(10, 30), (45, 61), (49_990, 50_000)]
    assert read_metadata(path, "text.txt", ranges)["url"].to_pylist() == ["1", "2", "4", "5", "6", "4999"]
    assert read_metadata(path, "held-out.txt", [(0, 20)])["url"].to_pylist() == ["0", "3"]
    assert len(read_metadata(path, "text.txt", [])) == len(read_metadata(path, "other", [(0, 9)])) == 0


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    tables = MetadataTables()
    tables.write(tmp_path / "metadata.parquet")
    tables.add_split("text.txt", DocumentRows(), [], "held-out.txt", 0)
    tables.write(tmp_path / "metadata.parquet")
    assert not any(tmp_path.iterdir())
