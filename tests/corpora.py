"""Small sources of text, and reading them, for the tests of several files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.corpus import DataConfig, Tally, documents
from lm.pretokens import END_OF_TEXT

EOT = END_OF_TEXT


def read(url: str, config: DataConfig | None = None, tally: Tally | None = None) -> list[str]:
    """All documents of a source."""
    return list(documents(url, config or DataConfig(), tally or Tally()))


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def jsonl(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)
