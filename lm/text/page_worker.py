"""Text and metadata of web pages and WARC records, in a process of its own: a hostile page can crash its parser.

``python -m lm.text.page_worker`` answers requests of :class:`lm.text.web_pages.PageReader`. Needs the extra ``web``:
resiliparse (Bevendorff et al. 2018, https://resiliparse.chatnoir.eu) and fastwarc.
"""

import contextlib
import io
import json
import re
import signal
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from typing import Any

from lm.common.processes import serve_parent

MAX_PAGE_BYTES = 16 << 20
MAX_PAGE_SECONDS = 5  # of CPU time; 16 MiB of usual pages take one, and thousands of nested tags take minutes
_MAX_MEMORY_BYTES = 2 << 30  # of the process; a page of 16 MiB takes some hundred megabytes
_MAX_VALUE_CHARACTERS = 2000  # of metadata
_HTML = "text/html", "application/xhtml+xml"
_SELECTORS = {  # the first element that has the attribute counts
    "url": [('link[rel="canonical" i]', "href")],
    "date": [
        ('meta[property="article:published_time" i]', "content"),
        ('meta[itemprop="datePublished" i]', "content"),
        ('meta[name="date" i]', "content"),
        ('meta[name="dc.date" i]', "content"),
    ],
    "language": [("html", "lang")],
    "licence": [
        ('link[rel~="license" i]', "href"),
        ('a[rel~="license" i]', "href"),
        ('meta[name="dc.rights" i]', "content"),
    ],
}
Answer = dict[str, Any]


class DamagedPageError(Exception):
    """A page or record cannot be read. The message is the reason."""


def decode_page(page: bytes, charset: str | None = None) -> str:
    """Decode a page: by its byte order mark, as UTF-8 if it is valid UTF-8, by ``charset`` (of the HTTP header), by the
    encoding that it states itself, or by the frequencies of its bytes. Invalid bytes are left out."""
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    for mark, encoding in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if page.startswith(mark):
            return page[len(mark) :].decode(encoding, "ignore")
    stated = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    stated = stated or detect_encoding(page, from_html_meta=True)
    if stated != "iso2022_jp":  # which is valid UTF-8 too
        with contextlib.suppress(UnicodeDecodeError):
            return page.decode()
    if stated in (None, "utf-8"):
        return page.decode("utf-8", "ignore")
    return bytes_to_str(page, stated, strip_bom=False)


def read_page(page: bytes, main_content: bool, charset: str | None = None) -> Answer:
    """Return the text of an HTML page, and the metadata that the page states."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(decode_page(page, charset))
    return {"text": extract_plain_text(tree, main_content=main_content), **_read_metadata(tree.document)}


def _read_metadata(document: Any) -> Answer:
    found: Answer = {}
    for name, selectors in _SELECTORS.items():
        for selector, attribute in selectors:
            element = document.query_selector(selector)
            value = _clean(element.getattr(attribute)) if element is not None else None
            if value and (name != "date" or _is_date(value)):
                found[name] = value
                break
    return found


def _clean(value: str | None) -> str | None:
    """Return a value in one line; None if it is empty or too long for a URL."""
    text = " ".join((value or "").split())
    return text if text and len(text) <= _MAX_VALUE_CHARACTERS else None


def _is_date(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return bool(re.fullmatch(r"\d{4}(-\d\d)?", value))
    return True


def read_record(record: bytes, main_content: bool) -> Answer:
    """Return the text and the metadata of a WARC record with a page: of HTML, or plain text, also in WET files.

    Other records have no field ``text``, and a field ``skipped`` with the reason if they are responses.
    """
    from fastwarc.warc import WarcRecordType

    parsed = _parse_record(record, "all")
    kind, headers = parsed.record_type, parsed.headers
    charset, language = None, headers.get("WARC-Identified-Content-Language")
    if kind == WarcRecordType.response:
        if not parsed.is_http_parsed or parsed.http_headers.status_code is None:
            return {"skipped": "no HTTP response"}
        if parsed.http_headers.status_code != 200:
            return {"skipped": "not HTTP status 200"}
        content_type, charset = parsed.http_content_type, parsed.http_charset
        language = language or parsed.http_headers.get("Content-Language")
    elif kind in (WarcRecordType.resource, WarcRecordType.conversion):
        content_type = (headers.get("Content-Type") or "").partition(";")[0]
    else:
        return {}
    content_type = (content_type or "").strip().lower()
    if content_type not in (*_HTML, "text/plain"):
        return {"skipped": "neither HTML nor plain text"}
    try:
        page = parsed.reader.read(MAX_PAGE_BYTES + 1)
    except OSError as error:
        # Some crawlers store the decoded page with the headers of the encoded one.
        page = _parse_record(record, "none").reader.read(MAX_PAGE_BYTES + 1)
        if not page.lstrip().startswith(b"<"):
            raise DamagedPageError(f"cannot be decoded: {error}") from None
    if len(page) > MAX_PAGE_BYTES:
        raise DamagedPageError(f"longer than {MAX_PAGE_BYTES >> 20} MiB")
    answer = read_page(page, main_content, charset) if content_type in _HTML else {"text": decode_page(page, charset)}
    date = headers.get("WARC-Date") or ""
    stated = {
        "url": _clean((headers.get("WARC-Target-URI") or "").strip("<>")),  # WARC 1.0 had them in angle brackets
        "date": answer.get("date") or (date if _is_date(date) else None),
        "language": answer.get("language") or _clean(language),
    }
    return answer | {name: value for name, value in stated.items() if value}


def _parse_record(record: bytes, auto_decode: str) -> Any:
    from fastwarc.warc import ArchiveIterator

    options: dict[str, Any] = {"auto_decode": auto_decode, "strict_mode": False, "stream_detect": False}
    try:
        parsed = next(ArchiveIterator(io.BytesIO(record), **options), None)
    except OSError as error:
        raise DamagedPageError(str(error)) from None
    if parsed is None:
        raise DamagedPageError("no WARC record")
    return parsed


def _answer(work: Callable[[], Answer]) -> bytes:
    """Return the answer as JSON."""
    try:
        return json.dumps(work()).encode()
    except DamagedPageError as error:
        answer = {"damaged": str(error)}
    except BaseException as error:  # hostile pages raise anything; a panic in Rust is no Exception
        answer = {"damaged": f"its parser raised {error!r}"[:300]}
    return json.dumps(answer).encode()


def main() -> None:
    """Answer requests until the input ends. The first byte is ``p`` for a page or ``r`` for a record, the second ``m``
    for its main content or ``w`` for its whole text."""
    requests, send_answer = serve_parent()
    for library in ("resiliparse.extract.html2text", "resiliparse.parse.html", "fastwarc.warc"):
        import_module(library)  # does not count as a page's time
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for request in requests:
        read = read_page if request[:1] == b"p" else read_record
        page, main_content = request[2:], request[1:2] == b"m"
        signal.setitimer(signal.ITIMER_PROF, MAX_PAGE_SECONDS)
        answer = _answer(lambda read=read, page=page, main=main_content: read(page, main))  # type: ignore[misc]
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_answer(answer)


if __name__ == "__main__":
    main()
