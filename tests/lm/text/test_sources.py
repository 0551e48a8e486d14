"""Sources: paths, globs and URLs, every compression, and errors."""

import bz2
import functools
import gzip
import http.server
import json
import lzma
import os
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.demo_corpus import demo_stories
from lm.text.sources import (
    Source,
    detect_format,
    expand_urls,
    hash_source,
    is_plain_local_file,
    open_decompressed,
    open_ranges,
    remote_version,
    source_version,
)
from lm.text.statistics import TextStatistics
from lm.text.utf8 import decode_utf8_blocks
from tests.helpers.corpora import EOT, read_documents, serve_http, write_parquet, write_text

TEXT = "".join(f"Story {i}: naïve 日本語 🙂\n{EOT}\n" for i in range(300))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
compressed = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])


def read_text(url: str) -> str:
    with open_decompressed(url) as blocks:
        return "".join(decode_utf8_blocks(blocks, url))


# paths, globs and URLs


def test_a_missing_file_raises_a_user_error(tmp_path: Path) -> None:
    url = str(tmp_path / "none.txt")
    for reader in (hash_source, read_documents, read_text):
        with pytest.raises(UserError, match=r"none\.txt does not exist"):
            reader(url)
    assert expand_urls([url]) == [url]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"ETag": '"a1"', "LastModified": "2026-01-01"}, ('"a1"', '"a1"')),  # S3
        ({"etag": "CJ", "updated": "2026-01-01", "mtime": "2026-01-01"}, ("CJ", "CJ")),  # Google
        ({"etag": "0x8D", "last_modified": "2026-01-01", "creation_time": "2025"}, ("0x8D", "0x8D")),  # Azure
        ({"ETag": None, "Last-Modified": "Thu, 01 Jan"}, ("Thu, 01 Jan", "")),  # a web server
        ({"size": 5}, ("", "")),
    ],
)
def test_each_store_has_its_names_for_the_version(info: dict[str, Any], expected: tuple[str, str]) -> None:
    assert remote_version(info) == expected


def test_a_directory_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory; name its files, such as"):
        hash_source(str(tmp_path))


def test_an_empty_file_raises_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        hash_source(str(tmp_path / "empty.txt"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_read_permission_raises_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be opened"):
        hash_source(str(path))


@pytest.mark.parametrize("pattern", ["*.csv", "no-such-folder/*.txt", "file-[0-9].txt"])
def test_a_glob_without_a_match_raises_a_user_error(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="No file matches"):
        expand_urls([str(tmp_path / pattern)])


def test_matches_of_a_glob_are_sorted_and_patterns_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "odd[1].txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "folder-link.txt").symlink_to("folder.txt")
    (tmp_path / "broken-link.txt").symlink_to("none.txt")
    monkeypatch.chdir(tmp_path)
    urls = expand_urls(["c.jsonl", "*.txt", str(tmp_path / "odd[1].txt"), "demo:3"])
    names = ["c.jsonl", "a.txt", "b.txt", "link.txt", "odd[1].txt", "odd[1].txt"]
    assert urls == [*(str(tmp_path / name) for name in names), "demo:3"]
    assert expand_urls([f"file://{tmp_path}/a.txt"]) == [str(tmp_path / "a.txt")]


def test_a_local_glob_follows_links_to_directories_and_leaves_out_hidden_files(tmp_path: Path) -> None:
    for name in ("corpora/a/1", "corpora/a/.hidden", "corpora/.hidden/2", "other/3", "other/deep/4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.txt").write_text("x")
    (tmp_path / "corpora/b").symlink_to("../other")
    for pattern, names in (("*/*.txt", ["a/1", "b/3"]), ("**/*.txt", ["a/1", "b/3", "b/deep/4"])):
        assert expand_urls([f"{tmp_path}/corpora/{pattern}"]) == [f"{tmp_path}/corpora/{name}.txt" for name in names]


@pytest.mark.parametrize("name", ["x::y.txt", "data:x.txt", "memory::x.txt", "root:x.txt"])
def test_a_local_name_may_look_like_a_url_of_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("x", "y.txt", "x.txt"):
        (tmp_path / other).write_text("another file")
    (tmp_path / name).write_text(name)
    for pattern in (name, f"{name[:4]}*t", f"file://{tmp_path}/{name}", f"file:{name}"):
        assert expand_urls([pattern]) == [str(tmp_path / name)]
    for path in (name, str(tmp_path / name)):
        assert read_text(path) == name
        assert is_plain_local_file(path)


def test_a_chain_of_urls_is_read_and_takes_no_glob(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("a.txt", "in the archive")
    url = f"zip://a.txt::{tmp_path}/archive.zip"
    assert expand_urls([url]) == [url]
    assert read_text(url) == "in the archive"
    with pytest.raises(UserError, match=r"zip://\*\.txt::.* takes no pattern; name each file"):
        expand_urls([f"zip://*.txt::{tmp_path}/archive.zip"])
    assert expand_urls([f"simplecache::memory://{tmp_path.name}.txt"]) == [f"simplecache::memory://{tmp_path.name}.txt"]


@pytest.mark.parametrize("url", ["foo://bar", "zip://a.txt::{path}", "reference://x", "dir://"])
def test_a_url_that_opens_no_file_system_raises_a_user_error(tmp_path: Path, url: str) -> None:
    url = url.format(path=write_text(tmp_path / "a.txt", "not a zip file"))
    for reader in (lambda url: expand_urls([url]), hash_source, read_documents, source_version):
        with pytest.raises(UserError, match=rf"^{re.escape(url)} cannot be used: .+"):
            reader(url)


@pytest.mark.parametrize("url", ["demo:", "demo:0", "demo:-3", "demo:many", "demo:1.5", "demo: 5", "demo:²"])
def test_a_malformed_demo_url_raises_a_user_error(url: str) -> None:
    for reader in (hash_source, read_documents):
        with pytest.raises(UserError, match="names no demo corpus; write demo:N"):
            reader(url)


def test_the_demo_corpus_is_deterministic() -> None:
    statistics = TextStatistics()
    documents = read_documents("demo:20", statistics=statistics)
    assert "".join(documents) == "".join(demo_stories(20))
    assert statistics.documents == 20
    assert hash_source("demo:20") == hash_source("demo:20") != hash_source("demo:21")
    assert list(demo_stories(40))[:20] == list(demo_stories(20)) != list(demo_stories(20, seed=1))


def test_a_source_is_hashed_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"abc" * 1000, mtime=0))
    assert hash_source(str(path)).bytes == path.stat().st_size
    other = tmp_path / "b.txt"
    other.write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_source(str(other)) == Source(str(other), 3, digest)


def test_a_version_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    assert source_version(str(path)) is None
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    before = source_version(str(path))
    assert before == source_version(str(path))
    path.write_text("two")
    assert source_version(str(path)) != before
    assert source_version("demo:5") is None


def test_a_version_changes_with_a_file_that_keeps_its_size_and_mtime(tmp_path: Path) -> None:
    """As after ``cp -p`` or ``touch -r``."""
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    for file, text in ((path, "one"), (other, "two")):
        file.write_text(text)
        os.utime(file, ns=(1, 1))
    before = source_version(str(path))
    assert before and json.loads(json.dumps(before)) == list(before)
    time.sleep(0.05)  # the kernel updates ctime every few milliseconds
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    written = source_version(str(path))
    assert written and written != before and written[0] == before[0]
    other.replace(path)
    assert source_version(str(path)) not in (before, written)
    os.utime(path, ns=(1, 2))
    assert source_version(str(path)) != written


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("a.txt", ("text", "")),
        ("a", ("text", "")),
        ("a.tar/b", ("text", "")),
        ("A.JSONL.GZ", ("jsonl", ".gz")),
        ("a.ndjson.zst", ("jsonl", ".zst")),
        ("a.parquet", ("parquet", "")),
        ("a.gz", ("text", ".gz")),
        ("https://host/a.jsonl.xz?download=1.parquet", ("jsonl", ".xz")),
        ("https://host/a.jsonl#part.txt", ("jsonl", "")),
        ("what?.jsonl", ("jsonl", "")),
        ("memory://what?.jsonl", ("jsonl", "")),
        ("s3://bucket/what?#.jsonl", ("jsonl", "")),
        ("s3://bucket/a.jsonl?versionId=b", ("jsonl", "")),
        ("zip://a.jsonl.gz::file:///b.zip", ("jsonl", ".gz")),
        ("simplecache::memory://a.jsonl", ("jsonl", "")),
        ("file:///a::b.jsonl", ("jsonl", "")),
    ],
)
def test_format_and_compression_follow_from_the_name(url: str, expected: tuple[str, str]) -> None:
    assert detect_format(url) == expected


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "A.TGZ", "a.zip", "a.tar.zst"])
def test_an_archive_raises_a_user_error(tmp_path: Path, name: str) -> None:
    for reader in (hash_source, read_documents):
        with pytest.raises(UserError, match=rf"{name} is an archive; unpack it first"):
            reader(str(write_text(tmp_path / name, "text")))


def test_blocks_of_open_bytes_join_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.text.sources.BLOCK_BYTES", 7)
    path = write_text(tmp_path / "a.txt", TEXT)
    with open_decompressed(str(path)) as blocks:
        parts = list(blocks)
    assert b"".join(parts) == TEXT.encode()
    assert max(map(len, parts)) == 7


# compression


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_all_compressions_decompress_to_the_same_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    assert "".join(read_documents(str(path))) == TEXT == read_text(str(path))


@compressed
def test_concatenated_compressed_files_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    """The output of ``cat a.gz b.gz`` is valid in each format; parallel compressors write such files."""
    path = tmp_path / f"a.txt{suffix}"
    compress = COMPRESSIONS[suffix]
    path.write_bytes(compress(TEXT.encode()) + compress(b"the end"))
    assert read_text(str(path)) == TEXT + "the end"


@compressed
@pytest.mark.parametrize("damaged_byte", [0, 2, -2], ids=["first", "header", "near the end"])
def test_damage_of_a_later_stream_raises_a_user_error(tmp_path: Path, suffix: str, damaged_byte: int) -> None:
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix]
    later = bytearray(compress(TEXT.encode()))
    later[damaged_byte] ^= 0x55
    path.write_bytes(compress(b"one") + later + compress(b"three"))
    with pytest.raises(UserError, match="is corrupt or truncated"):
        read_text(str(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("zeros", [4, 1 << 17])
def test_zeros_may_follow_a_compressed_stream(tmp_path: Path, suffix: str, zeros: int) -> None:
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix]
    path.write_bytes((compress(TEXT.encode()) + bytes(zeros)) * 2)
    assert read_text(str(path)) == TEXT * 2


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
@pytest.mark.parametrize("read_bytes", [1, 7, 100])
def test_streams_do_not_depend_on_the_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, read_bytes: int
) -> None:
    monkeypatch.setattr("lm.text.sources._STREAM_READ_BYTES", read_bytes)
    monkeypatch.setattr("lm.text.sources.BLOCK_BYTES", 3)
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix]
    path.write_bytes(compress(b"one") + compress(b"") + bytes(8) + compress(b"two and three"))
    assert read_text(str(path)) == "onetwo and three"


@compressed
@pytest.mark.parametrize("left", [0.5, 0.99])
def test_a_truncated_file_raises_a_user_error(tmp_path: Path, suffix: str, left: float) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = COMPRESSIONS[suffix](TEXT.encode())
    path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(UserError, match=rf"a\.txt\{suffix} is corrupt or truncated"):
        read_documents(str(path))


@compressed
@pytest.mark.parametrize("damage", ["not compressed at all", "inside"])
def test_a_corrupt_file_raises_a_user_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = bytearray(COMPRESSIONS[suffix](TEXT.encode()))
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    path.write_bytes(data if damage == "inside" else TEXT.encode())
    # zstd has no checksum by default: damage may also appear as invalid UTF-8
    with pytest.raises(UserError, match="is corrupt or truncated" if suffix != ".zst" else "corrupt|not UTF-8"):
        read_documents(str(path))


def test_compressed_parquet_raises_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match="Parquet is compressed inside"):
        read_documents(str(path))


def test_open_ranges_yields_the_bytes_of_the_ranges(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good \xff bad")
    with open_ranges(str(path), [(0, 1), (2, 9)]) as blocks:
        assert b"".join(blocks) == b"god \xff ba"


# memory, HTTP and S3


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
    before = source_version(urls[1])
    assert before
    bucket.pipe("corpus/a.txt", TEXT.upper().encode())
    bucket.invalidate_cache()
    assert source_version(urls[1]) != before
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
