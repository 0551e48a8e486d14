"""Sources: paths, globs and URLs, every compression, and errors."""

import glob
import gzip
import json
import os
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.files.compression import detect_format
from lm.files.urls import file_version, remote_version
from lm.text.demo_corpus import demo_stories
from lm.text.documents import TextStatistics
from lm.text.sources import (
    Source,
    can_read_in_place,
    expand_urls,
    hash_source,
    is_plain_local_file,
    open_decompressed,
    open_ranges,
)
from tests.helpers.corpora import TEXT, read_documents, read_text, write_text


def test_a_missing_file_raises_a_user_error(tmp_path: Path) -> None:
    url = str(tmp_path / "none.txt")
    for reader in (hash_source, can_read_in_place, read_documents, read_text):
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


def test_two_stars_enter_each_directory_once_and_name_it_as_it_is(tmp_path: Path) -> None:
    for name in ("a/h.txt", "b/c/x.txt", "b/.hidden/x.txt", "z.txt"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/o.txt").write_text("o")
    (tmp_path / "outside/back").symlink_to("../tree")
    links = {"a/up": "..", "a/up2": "..", "b/self": ".", "a/link": "../b/c", "a/out": "../../outside", "b/loop": "loop"}
    for name, target in links.items():
        (tmp_path / "tree" / name).symlink_to(target)

    def find(pattern: str) -> list[str]:
        return [os.path.relpath(path, tmp_path / "tree") for path in expand_urls([f"{tmp_path}/{pattern}"])]

    names = ["a/h.txt", "a/out/o.txt", "b/c/x.txt", "z.txt"]
    for pattern in ("tree/**/*.txt", "tree/**", "tr*/**/**/*.txt", "tree/**/*"):
        assert find(pattern) == names, pattern
    assert find("tree/**/c/*.txt") == ["b/c/x.txt"]
    assert find("tree/**/c/**/x.txt") == ["b/c/x.txt"]
    assert find("tree/a/**/h.txt") == ["a/h.txt"]
    assert find("tree/a/*/z.txt") == ["a/up/z.txt", "a/up2/z.txt"], "one level follows each link"


@pytest.mark.parametrize("pattern", ["**/*.t?t", "*/**/*.txt", "**", "**/b/**/*.txt", "*/[ab]/**/c*/*"])
def test_without_links_two_stars_match_as_pythons_glob(tmp_path: Path, pattern: str) -> None:
    for name in ("a/b/c[1]/1.txt", "a/b/2.tat", "a/.b/3.txt", "b/b/c/4.txt", "*/b/5.txt", "6.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = set(filter(os.path.isfile, glob.glob(f"{tmp_path}/{pattern}", recursive=True)))
    assert expand_urls([f"{tmp_path}/{pattern}"]) == sorted(files)


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
    for reader in (lambda url: expand_urls([url]), hash_source, read_documents, file_version):
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
    assert file_version(str(path)) is None
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    before = file_version(str(path))
    assert before == file_version(str(path))
    path.write_text("two")
    assert file_version(str(path)) != before
    assert file_version("demo:5") is None


def test_a_version_changes_with_a_file_that_keeps_its_size_and_mtime(tmp_path: Path) -> None:
    """As after ``cp -p`` or ``touch -r``."""
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    for file, text in ((path, "one"), (other, "two")):
        file.write_text(text)
        os.utime(file, ns=(1, 1))
    before = file_version(str(path))
    assert before and json.loads(json.dumps(before)) == list(before)
    time.sleep(0.05)  # the kernel updates ctime every few milliseconds
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    written = file_version(str(path))
    assert written and written != before and written[0] == before[0]
    other.replace(path)
    assert file_version(str(path)) not in (before, written)
    os.utime(path, ns=(1, 2))
    assert file_version(str(path)) != written


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
    monkeypatch.setattr("lm.files.compression.BLOCK_BYTES", 7)
    path = write_text(tmp_path / "a.txt", TEXT)
    with open_decompressed(str(path)) as blocks:
        parts = list(blocks)
    assert b"".join(parts) == TEXT.encode()
    assert max(map(len, parts)) == 7


def test_open_ranges_yields_the_bytes_of_the_ranges(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good \xff bad")
    with open_ranges(str(path), [(0, 1), (2, 9)]) as blocks:
        assert b"".join(blocks) == b"god \xff ba"
