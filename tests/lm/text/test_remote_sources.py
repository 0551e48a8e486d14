"""Sources in memory, on the web, and in a bucket."""

import functools
import gzip
import http.server
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lm.common.errors import UserError
from lm.files.urls import file_version
from lm.text.config import DataConfig
from lm.text.sources import Source, expand_urls, hash_source, is_plain_local_file
from tests.helpers.corpora import COMPRESSIONS, EOT, TEXT, read_documents, read_text, serve_http, write_parquet


def test_sources_in_memory() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/corpus/b.txt", TEXT.encode())
    fs.pipe("/corpus/a.txt.gz", gzip.compress(TEXT.encode()))
    urls = expand_urls(["memory://corpus/*"])
    assert urls == ["memory:///corpus/a.txt.gz", "memory:///corpus/b.txt"]
    for url in urls:
        assert "".join(read_documents(url)) == TEXT
        assert not is_plain_local_file(url)
    assert hash_source(urls[1]).bytes == len(TEXT.encode())
    with pytest.raises(UserError, match="does not exist"):
        hash_source("memory://corpus/none")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without support for byte ranges, like many web servers."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def web(web_folder: Path) -> Iterator[str]:
    """Yield the URL of a local web server for ``web_folder``."""
    with serve_http(functools.partial(QuietHandler, directory=str(web_folder))) as url:
        yield url


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_sources_on_the_web(web: str, web_folder: Path, suffix: str) -> None:
    (web_folder / f"a.txt{suffix}").write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    url = f"{web}/a.txt{suffix}?download=true"
    assert expand_urls([url]) == [url]
    assert "".join(read_documents(url)) == TEXT
    assert hash_source(url).bytes == (web_folder / f"a.txt{suffix}").stat().st_size
    assert not is_plain_local_file(url)


def test_a_long_source_on_a_web_server_without_byte_ranges(web: str, web_folder: Path) -> None:
    """Longer than fsspec's block of 5 MB, which it fetches by a range request if the server supports ranges."""
    (web_folder / "long.txt").write_bytes(b"0123456789abcde\n" * 500_000)
    assert hash_source(f"{web}/long.txt") == Source(
        f"{web}/long.txt", 8_000_000, hash_source(str(web_folder / "long.txt")).sha256
    )


def test_parquet_on_the_web(web: str, web_folder: Path) -> None:
    write_parquet(web_folder / "a.parquet", text=["one", "two"])
    assert read_documents(f"{web}/a.parquet") == [f"one{EOT}", f"two{EOT}"]


def test_parquet_of_a_web_server_without_byte_ranges(
    web: str, web_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.text.sources._RANGE_BLOCK_BYTES", 100)  # a shorter file is read as a whole
    path, url = write_parquet(web_folder / "b.parquet", text=["one", "two"]), f"{web}/b.parquet"
    assert hash_source(url) == Source(url, *astuple(hash_source(path))[1:])
    with pytest.raises(UserError, match=r"b\.parquet: the web server serves no byte ranges. Download the file"):
        read_documents(url)
    monkeypatch.undo()
    with pytest.raises(UserError, match="no column 'body'"):
        read_documents(url, DataConfig(text_field="body"))


class EncodingHandler(QuietHandler):
    """Sends gzip as the encoding of a text, though the client asks for none, as some servers do."""

    def end_headers(self) -> None:
        self.send_header("Content-Encoding", "gzip")
        super().end_headers()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_web_server_may_encode_a_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(TEXT.encode()))
    with serve_http(functools.partial(EncodingHandler, directory=str(tmp_path))) as url:
        assert read_text(f"{url}/{name}") == TEXT


def test_a_source_missing_on_the_web_raises_a_user_error(web: str) -> None:
    for reader in (hash_source, read_documents):
        with pytest.raises(UserError, match=r"none\.txt does not exist"):
            reader(f"{web}/none.txt")


def test_sources_on_s3(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe("corpus/a.txt", TEXT.encode())
    bucket.pipe("corpus/b.txt.gz", gzip.compress(TEXT.encode()))
    bucket.put(write_parquet(tmp_path / "c.parquet", text=["one"]), "corpus/c.parquet")
    urls = expand_urls(["s3://corpus/*.parquet", "s3://corpus/*txt*"])
    assert urls == ["s3://corpus/c.parquet", "s3://corpus/a.txt", "s3://corpus/b.txt.gz"]
    assert "".join(read_documents(urls[1])) == "".join(read_documents(urls[2])) == TEXT
    assert read_documents(urls[0]) == [f"one{EOT}"]
    assert hash_source(urls[1]).bytes == len(TEXT.encode())
    assert not is_plain_local_file(urls[1])
    before = file_version(urls[1])
    assert before
    bucket.pipe("corpus/a.txt", TEXT.upper().encode())
    bucket.invalidate_cache()
    assert file_version(urls[1]) != before
    for url in ("s3://corpus/none.txt", "s3://no-such-bucket/a.txt"):
        with pytest.raises(UserError, match=r"does not exist|cannot be opened"):
            hash_source(url)
    with pytest.raises(UserError, match="No file matches"):
        expand_urls(["s3://corpus/*.csv"])


def test_a_glob_in_a_bucket_asks_for_no_single_file(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt", "folder.txt/c.txt"):
        bucket.pipe(f"corpus/{name}", b"x")
    requests: list[str] = []
    call = type(bucket)._call_s3

    async def spy(fs: Any, method: str, *arguments: Any, **options: Any) -> Any:
        requests.append(method)
        return await call(fs, method, *arguments, **options)

    monkeypatch.setattr(type(bucket), "_call_s3", spy)
    assert expand_urls(["s3://corpus/*.txt"]) == ["s3://corpus/a.txt", "s3://corpus/b.txt"]
    assert requests.count("head_object") <= 1, "for a file whose name is the pattern"
