"""Small text sources for tests, and a reader for them."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.text.config import DataConfig
from lm.text.documents import stream_documents
from lm.text.pretokenize import END_OF_TEXT
from lm.text.statistics import TextStatistics

EOT = END_OF_TEXT


def read_documents(url: str, config: DataConfig | None = None, statistics: TextStatistics | None = None) -> list[str]:
    """Return the documents of a source, each as one string."""
    config = config or DataConfig()
    documents = [""]
    for piece in stream_documents(url, config, statistics or TextStatistics()):
        documents[-1] += piece
        if piece.endswith(config.separator):
            documents.append("")
    return documents if documents[-1] else documents[:-1]


def write_text(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def write_jsonl(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@contextmanager
def serve_http(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the URL of a local web server that answers with ``handler``."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
