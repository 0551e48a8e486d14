"""Text of a group as JSON Lines or Parquet, one document a row, for other tools."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.config import TextFormat
from lm.curate.text_parts import TextPart, read_batches
from lm.text.sources import open_ranges

_SCHEMA = pa.schema([("text", pa.large_string())])


def export_texts(parts: Sequence[TextPart], separator: str, file_format: TextFormat, path: Path) -> tuple[int, int]:
    """Write the documents of texts to a file, in their order. Return their number and bytes.

    Rows have the field ``text``. Holds some documents at a time. Raises OSError if the file cannot be written.
    """
    documents = size = 0
    open_file: Any = _open_parquet if file_format == "parquet" else _open_lines
    with open_file(path) as write:
        for batch in read_batches(parts, separator):
            texts = []
            for document, place in zip(batch.documents, batch.places.tolist(), strict=True):
                data = document.data
                if not document.is_whole:
                    with open_ranges(parts[batch.part].url, [(place, place + document.size)]) as blocks:
                        data = b"".join(blocks)
                texts.append(data.decode("utf-8", "replace"))
                documents, size = documents + 1, size + document.size
            write(texts)
    return documents, size


@contextmanager
def _open_lines(path: Path) -> Iterator[Any]:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        yield lambda texts: file.write(
            "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
        )


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as file:
        yield lambda texts: file.write_table(pa.table({"text": texts}, schema=_SCHEMA))
