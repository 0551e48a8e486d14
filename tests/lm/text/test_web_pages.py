"""Documents of HTML pages and WARC files."""

import gzip
import io
import signal
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

pytest.importorskip("resiliparse", reason="resiliparse is not installed")
pytest.importorskip("fastwarc", reason="fastwarc is not installed")

from fastwarc.warc import WarcRecord, WarcRecordType
from hypothesis import given
from hypothesis import strategies as st
from resiliparse.extract.html2text import extract_plain_text

from lm.common.errors import UserError
from lm.common.processes import ChildEnded, ChildProcess
from lm.curate import extract_text
from lm.text.config import DataConfig
from lm.text.document_metadata import DocumentMetadata
from lm.text.documents import TextStatistics, stream_documents
from lm.text.page_worker import decode_page
from lm.text.web_pages import PageReader, PageText, WebPages, read_web_documents
from tests.helpers.corpora import EOT
from tests.helpers.examples import examples
from tests.helpers.web import warc_record, write_warc

PAGE = """<!DOCTYPE html><html lang="de-AT"><head><title>Titel</title>
<link rel="canonical" href="http://a/canonical"><link rel="License" href="https://creativecommons.org/licenses/by/4.0/">
<meta property="article:published_time" content="2024-05-06T07:08:09Z"></head><body>
<nav><a href="/">Start</a> <a href="/b">Mehr</a></nav><main><p>Grüße aus Köln. Dies ist der Text der Seite.</p>
<ul><li>eins<li>zwei</ul></main><footer>Impressum</footer></body></html>"""
READER = PageReader()


def read(url: str, page_text: PageText = "whole") -> tuple[list[str], WebPages]:
    pages = WebPages(reader=READER)
    return [text for _, text in read_web_documents(url, page_text, pages)], pages


def test_the_text_of_a_page_is_that_of_resiliparse() -> None:
    assert extract_text(PAGE.encode()) == extract_plain_text(PAGE)
    assert extract_text(PAGE.encode(), main_content=True) == extract_plain_text(PAGE, main_content=True)
    assert "Impressum" in extract_plain_text(PAGE) and "Impressum" not in extract_plain_text(PAGE, main_content=True)
    assert extract_text(b"") == ""


@given(st.text(max_size=200))
@examples(30)
def test_text_of_any_page_is_that_of_resiliparse(text: str) -> None:
    html = f"<p>{text}<div>a &lt; b</div>".encode("utf-8", "replace")
    assert extract_text(html) == extract_plain_text(html.decode())


@given(st.binary(max_size=300))
@examples(30)
def test_any_bytes_have_a_text(page: bytes) -> None:
    assert extract_text(page) is not None
    assert extract_text(b"<html>" + page) is not None


@given(st.data())
@examples(60)
def test_any_record_has_a_text_or_a_reason(data: st.DataObject) -> None:
    headers = data.draw(st.sampled_from(["", "Content-Encoding: gzip\r\n", "Transfer-Encoding: chunked\r\n"]))
    record = bytearray(warc_record(PAGE.encode(), headers=headers))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(record) - 1))
        record[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    fields = READER.read("record", bytes(record), "main")
    assert fields.keys() <= {"text", "url", "date", "language", "licence", "damaged", "skipped"}
    assert "crashed" not in fields.get("damaged", "")


TEXT = "Grüße: Straße, café, naïve Übung und noch mehr größere Wörter."
RUSSIAN, JAPANESE = (
    "Привет, мир! Это короткий русский текст о погоде.",
    "日本語の文章です。これは文字コードの検出のための例文です。",
)


@pytest.mark.parametrize(
    ("page", "charset", "text"),
    [
        (TEXT.encode(), None, TEXT),
        (TEXT.encode(), "iso-8859-1", TEXT),
        (TEXT.encode("latin-1"), "iso-8859-1", TEXT),
        (b"<meta charset=iso-8859-1>" + TEXT.encode("latin-1"), None, f"<meta charset=iso-8859-1>{TEXT}"),
        (TEXT.encode("utf-16"), None, TEXT),
        (TEXT.encode("utf-8-sig"), "ascii", TEXT),
        (RUSSIAN.encode("cp1251"), None, RUSSIAN),
        (RUSSIAN.encode("koi8-r"), "koi8-r", RUSSIAN),
        (JAPANESE.encode("euc-jp"), None, JAPANESE),
        (JAPANESE.encode("shift_jis"), "Shift_JIS", JAPANESE),
        (JAPANESE.encode("iso-2022-jp"), "iso-2022-jp", JAPANESE),
        (RUSSIAN.encode("cp1251"), "no-such-charset", RUSSIAN),
        (b"caf\xc3\xa9 " * 20 + b"\xff", "utf-8", "café " * 20),
    ],
)
def test_the_encoding_is_found(page: bytes, charset: str | None, text: str) -> None:
    decoded = decode_page(page, charset)
    assert decoded.rstrip("ÿ") == text if page.endswith(b"\xff") else decoded == text


@pytest.mark.parametrize("name", ["a.html", "a.htm", "a.html.gz"])
def test_a_page_is_a_document_with_metadata(tmp_path: Path, name: str) -> None:
    path, compress = tmp_path / name, gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(compress(PAGE.encode()))
    texts, pages = read(str(path), "main")
    assert texts == [extract_plain_text(PAGE, main_content=True)]
    licence = "https://creativecommons.org/licenses/by/4.0/"
    assert pages.metadata == DocumentMetadata("http://a/canonical", "2024-05-06T07:08:09Z", "de-AT", licence)
    documents = list(stream_documents(str(path), DataConfig(page_text="whole"), TextStatistics()))
    assert documents == [extract_plain_text(PAGE) + EOT]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.warc.zst"])
def test_pages_of_a_crawl(tmp_path: Path, name: str) -> None:
    records = [
        warc_record(b"", record_type="warcinfo"),
        warc_record(b"GET / HTTP/1.1\r\n\r\n", record_type="request"),
        warc_record("<p>Grüße".encode("latin-1"), url="http://a/1", content_type="text/html; charset=ISO-8859-1"),
        warc_record(b"<p>moved", status="301 Moved"),
        warc_record(b"\x89PNG", content_type="image/png"),
        warc_record(b"  ", url="http://a/empty"),
        warc_record(b"plain <b>text</b>", url="http://a/2", content_type="text/plain"),
        warc_record("WET: Grüße".encode(), url="<http://a/3>", record_type="conversion"),
        warc_record(b"no response at all", record_type="response").replace(b"HTTP/1.1 200", b"nothing here"),
    ]
    path = tmp_path / name
    if name.endswith(".zst"):
        import pyarrow as pa

        path.write_bytes(pa.compress(b"".join(records), "zstd", asbytes=True))
    else:
        write_warc(path, records)
    pages = WebPages(reader=READER)
    found = [(text, pages.metadata.url) for _, text in read_web_documents(str(path), "main", pages)]
    assert found[1:] == [("plain <b>text</b>", "http://a/2"), ("WET: Grüße", "http://a/3")]
    assert found[0] == ("Grüße", "http://a/1")
    assert pages.metadata.date == "2024-01-02T03:04:05Z" and not pages.damaged.count
    assert pages.skipped == {
        "not HTTP status 200": 1,
        "neither HTML nor plain text": 1,
        "no text": 1,
        "no HTTP response": 1,
    }


def test_a_file_of_fastwarc_with_compressed_and_chunked_responses(tmp_path: Path) -> None:
    body = gzip.compress(PAGE.encode())
    chunked = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    headers = b"Content-Type: text/html\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n"
    record = WarcRecord()
    record.init_headers(WarcRecordType.response)
    record.headers["WARC-Target-URI"] = "http://b/"
    record.headers["Content-Type"] = "application/http; msgtype=response"
    record.set_bytes_content(b"HTTP/1.1 200 OK\r\n" + headers + chunked)
    file = io.BytesIO()
    record.write(file)
    path = tmp_path / "a.warc"
    path.write_bytes(file.getvalue())
    texts, pages = read(str(path))
    assert texts == [extract_plain_text(PAGE)]
    assert (pages.metadata.url, pages.metadata.language) == ("http://b/", "de-AT")


@pytest.mark.parametrize("header", ["Transfer-Encoding: chunked", "Content-Encoding: gzip", "Content-Encoding: br"])
def test_a_page_that_the_crawler_has_decoded(tmp_path: Path, header: str) -> None:
    texts, pages = read(write_warc(tmp_path / "a.warc", [warc_record(PAGE.encode(), headers=f"{header}\r\n")]))
    assert texts == [extract_plain_text(PAGE)] and not pages.damaged.count
    texts, pages = read(write_warc(tmp_path / "a.warc", [warc_record(b"\x1f\x8bdamaged", headers=f"{header}\r\n")]))
    assert texts == [] and "cannot be decoded" in pages.damaged.names[0]


def test_damaged_records_are_skipped_counted_and_named(tmp_path: Path) -> None:
    good = [warc_record(f"<p>page {i}".encode()) for i in range(3)]
    members = [*map(gzip.compress, good)]
    members.insert(1, gzip.compress(warc_record(b"<p>bad", length=10)))
    members.insert(3, members[0][:40] + b"\0" * 30)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(members))
    texts, pages = read(str(path))
    assert texts == ["page 0", "page 1", "page 2"]
    assert pages.damaged.count == 2 and all(name.startswith(f"{path}, ") for name in pages.damaged.names)


def test_bombs_in_a_crawl_are_skipped(tmp_path: Path) -> None:
    """A compressed response, and a page of one word."""
    bomb = gzip.compress(bytes(100 << 20))
    records = [
        warc_record(bomb, headers="Content-Encoding: gzip\r\n"),
        warc_record(b"a" * (17 << 20)),
        warc_record(b"<p>good"),
    ]
    texts, pages = read(write_warc(tmp_path / "a.warc.gz", records), "main")
    assert texts == ["good"]
    assert [name.partition(": ")[2] for name in pages.damaged.names] == ["longer than 16 MiB"] * 2


@pytest.mark.slow
def test_a_page_of_nested_tags_is_skipped(tmp_path: Path) -> None:
    """10 MB of tags take minutes to parse, or crash the parser."""
    records = [warc_record(b"<div>" * 2_000_000), warc_record(b"<p>good")]
    texts, pages = read(write_warc(tmp_path / "a.warc.gz", records), "main")
    assert texts == ["good"]
    [name] = pages.damaged.names
    assert "took more than 5 seconds" in name or "crashed" in name


def test_a_parser_that_takes_too_long_costs_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PageReader()
    assert reader.read("page", b"<p>a", "whole") == {"text": "a"}
    with monkeypatch.context() as patched:  # the signal arrives as from the timer
        patched.setattr(ChildProcess, "ask", lambda child, request: end_by_timer(child))
        assert reader.read("page", b"<p>b", "whole") == {"damaged": "its parser took more than 5 seconds"}
    assert reader.read("page", b"<p>b", "whole") == {"text": "b"}, "another process takes over"
    reader.close()


def test_a_worker_that_cannot_start_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fastwarc").mkdir()
    (tmp_path / "fastwarc" / "__init__.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="The process that reads web pages failed"):
        PageReader().read("page", b"<p>a", "whole")


def end_by_timer(child: ChildProcess) -> bytes:
    child.process.send_signal(signal.SIGPROF)
    raise ChildEnded(child.process.wait())


def test_a_damaged_page_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.html.gz"
    path.write_bytes(gzip.compress(PAGE.encode())[:-20])
    texts, pages = read(str(path))
    assert texts == [] and "corrupt or truncated" in pages.damaged.names[0]
    large = tmp_path / "b.html"
    large.write_bytes(b"a" * ((16 << 20) + 1))
    texts, pages = read(str(large))
    assert texts == [] and pages.damaged.names == [f"{large}: longer than 16 MiB"]


@pytest.mark.parametrize("content", [b"hello\n", gzip.compress(b"hello"), b"\0" * 100])
def test_a_file_without_a_record_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ("a.warc.gz" if content[0] == 31 else "a.warc")
    path.write_bytes(content)
    with pytest.raises(UserError, match="has no WARC record"):
        read(str(path))


def test_a_missing_extra_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("lm.text.web_pages.metadata.version", version)
    (tmp_path / "a.html").write_text(PAGE)
    with pytest.raises(UserError, match=r"pip install 'textmill\[web\]'"):
        list(stream_documents(str(tmp_path / "a.html"), DataConfig(), TextStatistics()))


def test_a_separator_in_a_page_is_removed_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("<p>one &lt;|endoftext|&gt; two")
    with pytest.raises(UserError, match="contains the separator"):
        list(stream_documents(str(path), DataConfig(page_text="whole"), TextStatistics()))
    config = DataConfig(page_text="whole", separator_in_document="remove")
    assert list(stream_documents(str(path), config, TextStatistics())) == [f"one  two{EOT}"]
