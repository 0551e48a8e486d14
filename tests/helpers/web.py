"""Records of WARC files, written by hand."""

import gzip
from collections.abc import Iterable
from pathlib import Path


def http_response(page: bytes, content_type: str = "text/html", status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{headers}\r\n".encode() + page


def warc_record(
    page: bytes, *, url: str = "http://a/", record_type: str = "response", length: int | None = None, **http: str
) -> bytes:
    """Return a record: the HTTP response with a page, or for other types than ``response`` the page as plain text.

    ``length``: the stated one, if it is wrong.
    """
    content = http_response(page, **http) if record_type == "response" else page
    content_type = "application/http; msgtype=response" if record_type == "response" else "text/plain"
    header = (
        f"WARC/1.0\r\nWARC-Type: {record_type}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-01-02T03:04:05Z\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return header.encode() + content + b"\r\n\r\n"


def write_warc(path: Path, records: Iterable[bytes]) -> str:
    """Write records, each a gzip member if the name ends with .gz, and return the path."""
    compress = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(b"".join(map(compress, records)))
    return str(path)
