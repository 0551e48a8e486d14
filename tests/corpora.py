"""Small sources of text, and reading them, for the tests of several files."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.corpus import DataConfig, Tally, pieces
from lm.pretokens import END_OF_TEXT

EOT = END_OF_TEXT


def read(url: str, config: DataConfig | None = None, tally: Tally | None = None) -> list[str]:
    """All documents of a source."""
    config = config or DataConfig()
    found = [""]
    for piece in pieces(url, config, tally or Tally()):
        found[-1] += piece
        if piece.endswith(config.separator):
            found.append("")
    return found if found[-1] else found[:-1]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def jsonl(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL of a local web server that answers with ``handler``."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
