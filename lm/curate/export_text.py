"""Text of a group as JSON Lines or Parquet, one document a row, for other tools."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.curate.config import TextFormat
from lm.curate.text_parts import Batch, TextPart, find_metadata, read_batches
from lm.text.document_metadata import DocumentMetadata
from lm.text.sources import open_ranges

_METADATA = DocumentMetadata._fields


def export_texts(parts: Sequence[TextPart], separator: str, file_format: TextFormat, path: Path) -> tuple[int, int]:
    """Write the documents of texts to a file, in their order. Return their number and bytes.

    Rows have the field ``text``, and if a text has metadata, ``url``, ``date``, ``language`` and ``licence``. Holds
    some documents at a time. Raises OSError if the file cannot be written.
    """
    documents = size = 0
    names = ["text", *(_METADATA if any(part.metadata is not None for part in parts) else [])]
    schema = pa.schema([(name, pa.large_string() if name == "text" else pa.string()) for name in names])
    open_file: Any = _open_parquet if file_format == "parquet" else _open_lines
    with open_file(path, schema) as write:
        for batch in read_batches(parts, separator):
            part, texts = parts[batch.part], []
            for document, place in zip(batch.documents, batch.places.tolist(), strict=True):
                data = document.data
                if not document.is_whole:
                    with open_ranges(part.url, [(place, place + document.size)]) as blocks:
                        data = b"".join(blocks)
                texts.append(data.decode("utf-8", "replace"))
                documents, size = documents + 1, size + document.size
            columns = {"text": texts}
            if len(names) > 1:
                columns |= _metadata_columns(part, batch)
            write(pa.table(columns, schema=schema))
    return documents, size


def _metadata_columns(part: TextPart, batch: Batch) -> dict[str, Any]:
    rows = find_metadata(part, batch.ends)
    if part.metadata is None:
        return {name: [None] * len(rows) for name in _METADATA}
    table = part.metadata.take(pa.array(rows, mask=rows < 0))  # a null makes a row of nulls
    return {name: table[name] for name in _METADATA}


@contextmanager
def _open_lines(path: Path, schema: pa.Schema) -> Iterator[Any]:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        yield lambda table: file.write(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode()
        )


@contextmanager
def _open_parquet(path: Path, schema: pa.Schema) -> Iterator[Any]:
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        yield file.write_table
