"""Sources of text: everything that can be wrong with one, and every way to reach and compress one."""

import bz2
import functools
import gzip
import http.server
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.corpus import (
    DataConfig,
    Source,
    Tally,
    decode_blocks,
    expand,
    fingerprint,
    is_referable,
    open_bytes,
    open_range,
    split_suffixes,
    version,
)
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from tests.corpora import EOT, parquet, read, serving, write

TEXT = "".join(f"Story {i}: naïve 日本語 🙂\n{EOT}\n" for i in range(300))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
compressed = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])


def read_text(url: str) -> str:
    with open_bytes(url) as blocks:
        return "".join(decode_blocks(blocks, url))


# finding and opening sources


def test_a_missing_file_is_a_users_mistake(tmp_path: Path) -> None:
    url = str(tmp_path / "none.txt")
    for reader in (fingerprint, read, read_text):
        with pytest.raises(UserError, match=r"none\.txt does not exist"):
            reader(url)
    assert expand([url]) == [url]


def test_a_directory_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory; name its files, such as"):
        fingerprint(str(tmp_path))


def test_an_empty_file_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        fingerprint(str(tmp_path / "empty.txt"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be opened"):
        fingerprint(str(path))


@pytest.mark.parametrize("pattern", ["*.csv", "no-such-folder/*.txt", "file-[0-9].txt"])
def test_a_glob_without_a_match_is_a_users_mistake(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="No file matches"):
        expand([str(tmp_path / pattern)])


def test_a_glob_gives_its_files_sorted_in_the_order_of_the_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "odd[1].txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    monkeypatch.chdir(tmp_path)
    found = expand(["c.jsonl", "*.txt", str(tmp_path / "odd[1].txt"), "demo:3"])
    names = ["c.jsonl", "a.txt", "b.txt", "odd[1].txt", "odd[1].txt"]
    assert found == [*(str(tmp_path / name) for name in names), "demo:3"]
    assert expand([f"file://{tmp_path}/a.txt"]) == [str(tmp_path / "a.txt")]


def test_an_unknown_protocol_is_a_users_mistake() -> None:
    for reader in (lambda url: expand([url]), fingerprint, read, version):
        with pytest.raises(UserError, match=r"foo://bar cannot be read: .*foo"):
            reader("foo://bar")


@pytest.mark.parametrize("url", ["demo:", "demo:0", "demo:-3", "demo:many", "demo:1.5", "demo: 5", "demo:²"])
def test_a_malformed_demo_corpus_is_a_users_mistake(url: str) -> None:
    for reader in (fingerprint, read):
        with pytest.raises(UserError, match="names no demo corpus; write demo:N"):
            reader(url)


def test_the_demo_corpus_is_the_same_each_time() -> None:
    tally = Tally()
    found = read("demo:20", tally=tally)
    assert "".join(found) == "".join(demo_stories(20))
    assert tally.documents == 20
    assert fingerprint("demo:20") == fingerprint("demo:20") != fingerprint("demo:21")
    assert list(demo_stories(40))[:20] == list(demo_stories(20)) != list(demo_stories(20, seed=1))


def test_a_fingerprint_is_of_the_stored_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"abc" * 1000, mtime=0))
    assert fingerprint(str(path)).bytes == path.stat().st_size
    other = tmp_path / "b.txt"
    other.write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert fingerprint(str(other)) == Source(str(other), 3, digest)


def test_a_version_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    assert version(str(path)) is None
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    before = version(str(path))
    assert before == version(str(path))
    path.write_text("two")
    assert version(str(path)) != before
    assert version("demo:5") is None


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
        ("what?.jsonl", ("jsonl", "")),
    ],
)
def test_the_name_tells_kind_and_compression(url: str, expected: tuple[str, str]) -> None:
    assert split_suffixes(url) == expected


def test_blocks_of_open_bytes_join_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.corpus.BLOCK", 7)
    path = write(tmp_path / "a.txt", TEXT)
    with open_bytes(str(path)) as blocks:
        found = list(blocks)
    assert b"".join(found) == TEXT.encode()
    assert max(map(len, found)) == 7


# compression


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_every_compression_gives_the_same_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    assert "".join(read(str(path))) == TEXT == read_text(str(path))


@compressed
def test_joined_compressed_files_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    """``cat a.gz b.gz`` is a valid file of all these formats, and parallel compressors write such."""
    path = tmp_path / f"a.txt{suffix}"
    pack = COMPRESSIONS[suffix]
    path.write_bytes(pack(TEXT.encode()) + pack(b"the end"))
    assert read_text(str(path)) == TEXT + "the end"


@compressed
@pytest.mark.parametrize("left", [0.5, 0.99])
def test_a_truncated_file_is_a_users_mistake(tmp_path: Path, suffix: str, left: float) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = COMPRESSIONS[suffix](TEXT.encode())
    path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(UserError, match=rf"a\.txt\{suffix} is corrupt or truncated"):
        read(str(path))


@compressed
@pytest.mark.parametrize("damage", ["not compressed at all", "inside"])
def test_a_corrupt_file_is_a_users_mistake(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = bytearray(COMPRESSIONS[suffix](TEXT.encode()))
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    path.write_bytes(data if damage == "inside" else TEXT.encode())
    # zstd has no checksum by default: damage may also show as bytes that are not UTF-8
    with pytest.raises(UserError, match="is corrupt or truncated" if suffix != ".zst" else "corrupt|not UTF-8"):
        read(str(path))


def test_compressed_parquet_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match="Parquet is compressed inside"):
        read(str(path))


# UTF-8


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 1 << 20])
def test_invalid_utf8_is_named_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("lm.corpus.BLOCK", block)
    path = tmp_path / "bad.txt"
    for before in ("", "abc", "日本語", "x" * 1500 + "é"):
        for bad in (b"\xff", b"\xe6\x97!", b"\xf0\x9f\x99", b"\x80", b"\xed\xa0\x80"):
            data = before.encode()
            path.write_bytes(data + bad)
            with pytest.raises(UserError) as caught:
                read(str(path))
            assert f"bad.txt is not UTF-8: byte 0x{bad[0]:02x} at offset {len(data):,}. " in str(caught.value)


def test_invalid_utf8_past_the_first_block_is_named_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + "é".encode() + b"\xff")
    with pytest.raises(UserError, match="byte 0xff at offset 1,048,577"):
        read(str(path))


def test_a_range_is_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good \xff bad")
    with open_range(str(path), 2, 9) as blocks:
        assert b"".join(blocks) == b"od \xff ba"


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([b"a", "é".encode(), "🙂".encode(), "�".encode(), b"\xff", b"\xe6\x97", b"\xf0"])),
    st.integers(1, 5),
)
def test_decoding_in_blocks_equals_decoding_the_whole(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    tally = Tally()
    expected = data.decode("utf-8", "replace")
    assert "".join(decode_blocks(blocks, "x", "replace", tally)) == expected
    assert tally.replaced == expected.count("�") - parts.count("�".encode())
    if not tally.replaced:
        assert "".join(decode_blocks(blocks, "x")) == expected


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl", "bad.txt.gz"])
def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, name: str) -> None:
    data = b'{"text": "a\xffb\xe6\x97c \xef\xbf\xbd"}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match="not UTF-8: byte 0xff at offset 11"):
        read(str(path))
    tally = Tally()
    assert "a�b�c �" in "".join(read(str(path), DataConfig(invalid_utf8="replace"), tally))
    assert tally.replaced == 2


# other places than this machine's disk


def test_sources_in_memory() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/corpus/b.txt", TEXT.encode())
    fs.pipe("/corpus/a.txt.gz", gzip.compress(TEXT.encode()))
    urls = expand(["memory://corpus/*"])
    assert urls == ["memory:///corpus/a.txt.gz", "memory:///corpus/b.txt"]
    for url in urls:
        assert "".join(read(url)) == TEXT
        assert not is_referable(url)
    assert fingerprint(urls[1]).bytes == len(TEXT.encode())
    with pytest.raises(UserError, match="does not exist"):
        fingerprint("memory://corpus/none")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; knows no byte ranges, like many a web server."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def web(web_folder: Path) -> Iterator[str]:
    """URL of a local web server that serves ``web_folder``."""
    with serving(functools.partial(QuietHandler, directory=str(web_folder))) as url:
        yield url


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_sources_on_the_web(web: str, web_folder: Path, suffix: str) -> None:
    (web_folder / f"a.txt{suffix}").write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    url = f"{web}/a.txt{suffix}?download=true"
    assert expand([url]) == [url]
    assert "".join(read(url)) == TEXT
    assert fingerprint(url).bytes == (web_folder / f"a.txt{suffix}").stat().st_size
    assert not is_referable(url)


def test_a_long_source_on_a_web_server_without_byte_ranges(web: str, web_folder: Path) -> None:
    """Longer than the five megabytes that are fetched at once where there are ranges."""
    (web_folder / "long.txt").write_bytes(b"0123456789abcde\n" * 500_000)
    assert fingerprint(f"{web}/long.txt") == Source(
        f"{web}/long.txt", 8_000_000, fingerprint(str(web_folder / "long.txt")).sha256
    )


def test_parquet_on_the_web(web: str, web_folder: Path) -> None:
    parquet(web_folder / "a.parquet", text=["one", "two"])
    assert read(f"{web}/a.parquet") == [f"one{EOT}", f"two{EOT}"]


def test_a_source_missing_on_the_web_is_a_users_mistake(web: str) -> None:
    for reader in (fingerprint, read):
        with pytest.raises(UserError, match=r"none\.txt does not exist"):
            reader(f"{web}/none.txt")


def test_sources_on_s3(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe("corpus/a.txt", TEXT.encode())
    bucket.pipe("corpus/b.txt.gz", gzip.compress(TEXT.encode()))
    bucket.put(parquet(tmp_path / "c.parquet", text=["one"]), "corpus/c.parquet")
    urls = expand(["s3://corpus/*.parquet", "s3://corpus/*txt*"])
    assert urls == ["s3://corpus/c.parquet", "s3://corpus/a.txt", "s3://corpus/b.txt.gz"]
    assert "".join(read(urls[1])) == "".join(read(urls[2])) == TEXT
    assert read(urls[0]) == [f"one{EOT}"]
    assert fingerprint(urls[1]).bytes == len(TEXT.encode())
    assert not is_referable(urls[1])
    before = version(urls[1])
    assert before
    bucket.pipe("corpus/a.txt", TEXT.upper().encode())
    bucket.invalidate_cache()
    assert version(urls[1]) != before
    for url in ("s3://corpus/none.txt", "s3://no-such-bucket/a.txt"):
        with pytest.raises(UserError, match=r"does not exist|cannot be opened"):
            fingerprint(url)
    with pytest.raises(UserError, match="No file matches"):
        expand(["s3://corpus/*.csv"])
