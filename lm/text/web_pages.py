"""Documents of HTML pages and of WARC files. Damaged pages and records are skipped, counted and named."""

import hashlib
import json
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from lm.common.errors import UserError
from lm.common.processes import ChildEnded, ChildProcess
from lm.files.compression import decompress, detect_format, read_to_end
from lm.text.document_metadata import DocumentMetadata
from lm.text.page_worker import MAX_PAGE_BYTES, MAX_PAGE_SECONDS
from lm.text.page_worker import __name__ as WORKER_MODULE
from lm.text.rows import DamagedRows
from lm.text.sources import open_decompressed, open_raw
from lm.text.utf8 import replace_surrogates
from lm.text.warc_records import decompress_members, split_records

PageText = Literal["main", "whole"]


def is_web_format(url: str) -> bool:
    """Return whether a source is an HTML page or a WARC file, by its name."""
    return detect_format(url)[0] in ("html", "warc")


def page_reader_versions() -> list[str]:
    """Return the versions of the libraries that decide the text of pages. Raises UserError if one is missing."""
    try:
        return [f"{name} {metadata.version(name)}" for name in ("resiliparse", "fastwarc")]
    except ImportError:
        raise UserError("Web pages and WARC files need an extra: pip install 'textmill[web]'.") from None


class PageReader:
    """Reads pages in a process of its own, see :mod:`lm.text.page_worker`. Threads may share it: they take turns."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()

    def read(self, kind: Literal["page", "record"], data: bytes, page_text: PageText) -> dict[str, Any]:
        """Return the fields of an HTML page or a WARC record: ``text``, and of url, date, language and licence those
        that are stated; or ``damaged`` with the reason; or ``skipped`` with the reason; or nothing.

        Raises UserError if the extra ``web`` is missing.
        """
        if kind == "page" and len(data) > MAX_PAGE_BYTES:
            return {"damaged": f"longer than {MAX_PAGE_BYTES >> 20} MiB"}
        with self._lock:
            if not (self._process and self._process.is_running):  # it may have died after its last answer
                page_reader_versions()
                self._process = ChildProcess(WORKER_MODULE)
            try:
                return json.loads(self._process.ask(f"{kind[0]}{page_text[0]}".encode() + data))
            except ChildEnded as error:
                if error.code == -signal.SIGPROF:
                    return {"damaged": f"its parser took more than {MAX_PAGE_SECONDS} seconds"}
                if error.code == 1:
                    raise UserError("The process that reads web pages failed; its message is above.") from None
                return {"damaged": f"its parser crashed (code {error.code})"}

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process:
                self._process.close()


@dataclass
class WebPages:
    """What a reader of web pages learns besides their text."""

    damaged: DamagedRows = field(default_factory=DamagedRows)
    """Pages and records."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Pages without a text for training, by the reason."""
    metadata: DocumentMetadata = DocumentMetadata()
    """Of the document that was yielded last."""
    reader: PageReader = field(default_factory=PageReader)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of damaged and skipped pages, and the names of the first damaged ones."""
        return {"damaged": self.damaged.count, "names": self.damaged.names, "skipped": dict(self.skipped)}


def read_web_documents(
    url: str, page_text: PageText, pages: WebPages, digest: "hashlib._Hash | None" = None
) -> Iterator[tuple[str, str]]:
    """Yield (name of the page or record for messages, its text) of an HTML page or a WARC file.

    Adds the stored bytes to ``digest``, and what it skips to ``pages``. Raises UserError if the file cannot be read, if
    a WARC file has no record, or if the extra ``web`` is missing.
    """
    read = _read_html if detect_format(url)[0] == "html" else _read_warc
    for name, kind, data in read(url, pages, digest):
        fields = pages.reader.read(kind, data, page_text)
        if "damaged" in fields:
            pages.damaged.add(f"{url}, {name}", fields["damaged"])
        elif "skipped" in fields:
            pages.skipped[fields["skipped"]] += 1
        elif "text" in fields:
            text = replace_surrogates(fields.pop("text"))
            if not text.strip():
                pages.skipped["no text"] += 1
                continue
            pages.metadata = DocumentMetadata(**fields)
            yield name, text


Item = tuple[str, Literal["page", "record"], bytes]


def _read_html(url: str, pages: WebPages, digest: "hashlib._Hash | None") -> Iterator[Item]:
    page = bytearray()
    with open_raw(url) as raw:
        try:
            for block in decompress(raw, url, digest, is_utf8=False):  # to the end, for the digest
                page += block[: MAX_PAGE_BYTES + 1 - len(page)]
        except UserError as error:
            pages.damaged.add(url, str(error).removeprefix(f"{url} "))
            deque(_read(raw, digest), maxlen=0)
            return
    if len(page) > MAX_PAGE_BYTES:
        pages.damaged.add(url, f"longer than {MAX_PAGE_BYTES >> 20} MiB")
    else:
        yield "the page", "page", bytes(page)


def _read_warc(url: str, pages: WebPages, digest: "hashlib._Hash | None") -> Iterator[Item]:
    def add_damaged(place: str, reason: str) -> None:
        pages.damaged.add(f"{url}, {place}", reason)

    count = 0
    if detect_format(url)[1] == ".gz":
        with open_raw(url) as raw:
            for name, record in split_records(decompress_members(_read(raw, digest), add_damaged), add_damaged):
                count += 1
                yield name, "record", record
    else:
        with open_decompressed(url, digest) as blocks:
            for name, record in split_records(blocks, add_damaged):
                count += 1
                yield name, "record", record
    if not count:
        raise UserError(f"{url} has no WARC record; give a WARC file, or name the file by its format.")


def _read(raw: Any, digest: "hashlib._Hash | None") -> Iterator[bytes]:
    for block in read_to_end(raw):
        if digest:
            digest.update(block)
        yield block
