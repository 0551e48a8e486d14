"""Metadata of documents: URL, date, language and licence, in a Parquet file beside the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = "metadata.parquet"
_ROWS_AT_A_TIME = 4096  # as Python objects; pyarrow's columns take less memory


class DocumentMetadata(NamedTuple):
    """What a source states about a document; None where it states nothing."""

    url: str | None = None
    date: str | None = None
    """ISO 8601: the publication as the page states it, otherwise the day and time at which it was crawled."""
    language: str | None = None
    """A code as the source writes it, such as ``de-AT`` or ``deu``."""
    licence: str | None = None
    """Usually the URL of a licence."""


class DocumentRows:
    """The metadata of the documents of one text, in ascending order."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, DocumentMetadata]] = []
        self._tables: list[pa.Table] = []

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._tables))

    def add(self, source: int, start: int, end: int, metadata: DocumentMetadata) -> None:
        """Add the document of bytes ``start`` to ``end`` of the text, from source number ``source`` of its group."""
        self._rows.append((source, start, end, metadata))
        if len(self._rows) == _ROWS_AT_A_TIME:
            self._tables, self._rows = [*self._tables, self._convert()], []

    def to_table(self) -> "pa.Table":
        """Return the rows: ``start, end, source, url, date, language, licence``."""
        import pyarrow as pa  # slow to import

        return pa.concat_tables([*self._tables, self._convert()])

    def _convert(self) -> "pa.Table":
        import pyarrow as pa

        source, start, end, metadata = zip(*self._rows, strict=True) if self._rows else [()] * 4
        columns = {"start": pa.array(start, pa.int64()), "end": pa.array(end, pa.int64())}
        columns["source"] = pa.array(source, pa.int32())
        for number, name in enumerate(DocumentMetadata._fields):
            columns[name] = pa.array([document[number] for document in metadata], pa.string())
        return pa.table(columns)


class MetadataTables:
    """The content of a file of metadata: rows of several texts."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []

    def add(self, text: str, table: "pa.Table") -> None:
        """Add rows of the file ``text``."""
        import pyarrow as pa

        self._tables.append(table.add_column(0, "text", pa.array([text] * len(table), pa.string())))

    def add_split(
        self, text: str, rows: DocumentRows, held_out: Sequence[tuple[int, int]], copy: str, before: int
    ) -> None:
        """Add the rows of the file ``text``. The documents in the byte ranges ``held_out`` were copied to the file
        ``copy``, from byte ``before`` on."""
        import pyarrow as pa

        table = rows.to_table()
        ranges = np.array([*held_out, (1 << 62, 1 << 62)], np.int64)  # the last one: no document ends there
        copied_ends = before + np.cumsum(ranges[:, 1] - ranges[:, 0])
        sizes, ends = (table["end"].to_numpy() - table["start"].to_numpy()), table["end"].to_numpy()
        number = np.searchsorted(ranges[:, 1], ends)  # a document is the end of its range, after blank text
        is_copied = ranges[number, 1] == ends
        self.add(text, table.filter(pa.array(~is_copied)))
        copied, ends, sizes = table.filter(pa.array(is_copied)), copied_ends[number[is_copied]], sizes[is_copied]
        copied = copied.set_column(0, "start", pa.array(ends - sizes)).set_column(1, "end", pa.array(ends))
        self.add(copy, copied)

    def add_copy(self, path: Path, text: str, copy: str, before: int) -> None:
        """Add the rows of the file ``text`` of another file of metadata. The text was copied to ``copy`` from byte
        ``before`` on, and its sources are not those of the copy."""
        import pyarrow as pa
        import pyarrow.compute as pc

        table = read_metadata(path, text, [(0, 1 << 62)]).drop_columns("text")
        for number, name in enumerate(("start", "end")):
            table = table.set_column(number, name, pc.add(table[name], before))
        self.add(copy, table.set_column(2, "source", pa.array([None] * len(table), pa.int32())))

    def write(self, path: Path) -> None:
        """Write the rows to a file, if there are any."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if any(map(len, self._tables)):
            pq.write_table(pa.concat_tables(self._tables), path)


def read_metadata(path: Path, text: str, ranges: Sequence[tuple[int, int]]) -> "pa.Table":
    """Return the rows of the documents that lie in byte ranges of a text, also those of which a range has only a part.

    ``path`` is the file ``metadata.parquet`` beside the text, and ``text`` the name of the text's file. The ranges
    ascend, such as those of a chunk. The columns are ``text, start, end, source, url, date, language, licence``;
    ``source`` is the number of the source in the group of the text, and null in ``valid.txt``, which has text of all
    groups.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path, filters=[("text", "==", text)])
    starts, ends = (table[name].to_numpy() for name in ("start", "end"))
    parts = [
        table.slice(first, max(0, last - first))
        for first, last in (
            (int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, end, "left")))
            for start, end in ranges
        )
    ]
    return pa.concat_tables(parts) if parts else table.slice(0, 0)
