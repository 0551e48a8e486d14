"""Small text sources for tests, and a reader for them."""

import bz2
import gzip
import http.server
import lzma
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.text.config import DataConfig
from lm.text.documents import TextStatistics, stream_documents
from lm.text.pretokenize import END_OF_TEXT
from lm.text.sources import open_decompressed
from lm.text.utf8 import decode_utf8_blocks

EOT = END_OF_TEXT
TEXT = "".join(f"Story {i}: naïve 日本語 🙂\n{EOT}\n" for i in range(300))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def read_text(url: str) -> str:
    with open_decompressed(url) as blocks:
        return "".join(decode_utf8_blocks(blocks, url))


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
