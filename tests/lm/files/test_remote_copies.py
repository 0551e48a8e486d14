"""Token files on an object store: fetched while they fit, and otherwise read by ranges."""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tenacity import wait_none

from lm.common.errors import UserError
from lm.data.batches import gather_batch
from lm.data.token_shards import TokenShards
from lm.files import remote_copies, retry
from lm.files.remote_copies import fetch_directory, fetch_files, remove_old_copies
from lm.files.urls import open_filesystem, read_file, read_range

Shards = tuple[list[Path], list[str], dict[str, str]]


@pytest.fixture
def shards(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shards:
    """Three token files, each here and in the bucket, and the checksums of the latter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths, urls, checksums = [], [], {}
    for number, size in enumerate((50, 7, 30)):
        paths.append(tmp_path / f"{number}.bin")
        data = np.random.default_rng(number).integers(0, 300, size).astype("<u2").tobytes()
        paths[-1].write_bytes(data)
        bucket.pipe_file(f"corpus/{number}.bin", data)
        urls.append(f"s3://corpus/{number}.bin")
        checksums[urls[-1]] = hashlib.sha256(data).hexdigest()
    return paths, urls, checksums


def test_files_are_fetched_once_while_they_fit(shards: Shards, bucket: Any) -> None:
    paths, urls, checksums = shards
    fetched = fetch_files(urls, checksums, max_bytes=120)
    assert fetched[2] == urls[2], "100 and 14 bytes fit"
    assert [Path(path).read_bytes() for path in fetched[:2]] == [path.read_bytes() for path in paths[:2]]
    bucket.rm_file("corpus/0.bin")
    bucket.pipe_file("corpus/0.bin", b"x" * 100)
    assert fetch_files(urls, checksums, max_bytes=120) == fetched
    assert fetch_files(["/a/b"], {}, 0) == ["/a/b"]


@pytest.mark.parametrize("damage", [b"", b"\0" * 100])
def test_a_changed_copy_of_a_file_is_fetched_again(shards: Shards, damage: bytes) -> None:
    paths, urls, checksums = shards
    fetched = Path(fetch_files(urls[:1], checksums, 1000)[0])
    fetched.write_bytes(damage)
    assert fetch_files(urls[:1], checksums, 1000) == [str(fetched)]
    assert fetched.read_bytes() == paths[0].read_bytes()


def test_a_changed_copy_of_a_directory_is_fetched_again(shards: Shards, bucket: Any) -> None:
    bucket.pipe_file("corpus/tokenizer/vocab.json", b"{}")
    fetched = Path(fetch_directory("s3://corpus/tokenizer"))
    (fetched / "vocab.json").write_bytes(b"")
    assert fetch_directory("s3://corpus/tokenizer") == str(fetched)
    assert (fetched / "vocab.json").read_bytes() == b"{}"


@pytest.mark.parametrize("kind", ["shards", "directories"])
def test_the_locks_of_copies_do_not_become_more_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(400):
        with remote_copies._replace_copy(kind, str(number), lambda copy: True):
            pass
    assert len([*(tmp_path / "cache").rglob("*.lock")]) <= 256


FETCHES: list[Callable[[Shards], object]] = [
    lambda shards: fetch_files(shards[1], shards[2], 1000),
    lambda shards: fetch_directory("s3://corpus"),
]


@pytest.mark.parametrize("fetch", FETCHES)
def test_a_full_disk_is_named_at_once_and_leaves_no_file(
    shards: Shards, bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fetch: Callable[[Shards], object]
) -> None:
    calls = []

    def write_half(fs: Any, source: str, target: str) -> None:
        calls.append(source)
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(bucket), "get_file", write_half)
    with pytest.raises(UserError, match=r"downloads/.* cannot be written: No space left on device"):
        fetch(shards)
    assert len(calls) == 1
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size] == []


@pytest.mark.parametrize("fetch", FETCHES)
def test_a_cache_that_cannot_be_written_is_named(
    shards: Shards, tmp_path: Path, fetch: Callable[[Shards], object]
) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(UserError, match=r"cache/textmill.* cannot be written: Not a directory"):
        fetch(shards)


def test_the_least_recently_used_copies_are_deleted_except_shards_of_a_running_training(
    shards: Shards, bucket: Any
) -> None:
    _, urls, checksums = shards
    bucket.pipe_file("corpus/tokenizer/vocab.json", b"{}")
    shard, directory = Path(fetch_files(urls[:1], checksums, 1000)[0]), Path(fetch_directory("s3://corpus/tokenizer"))
    for copy in (shard.parent, directory):
        os.utime(copy, (time.time() - 48 * 3600,) * 2)
    remove_old_copies(0)
    assert (shard.exists(), directory.exists()) == (True, False)
    remote_copies._hold.cache_clear()  # the training ends
    remove_old_copies(1000)
    assert shard.exists()
    fetch_files(urls[:1], checksums, 1000)
    remote_copies._hold.cache_clear()
    remove_old_copies(0)
    assert shard.exists(), "it was used less than a day ago"
    os.utime(shard.parent, (time.time() - 48 * 3600,) * 2)
    remove_old_copies(0)
    assert not shard.exists()


def test_a_job_without_a_checksum_of_a_file_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match=r"no checksum of s3://corpus/0\.bin; add its SHA-256 to checksums"):
        fetch_files(shards[1], {}, 1000)


def test_the_sizes_of_files_past_the_limit_are_not_requested(
    shards: Shards, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    monkeypatch.setattr(remote_copies, "_BATCH_URLS", 2)

    def size(fs: Any, path: str) -> int:
        requested.append(path)
        return 100

    monkeypatch.setattr(type(bucket), "size", size)
    _, urls, checksums = shards
    assert fetch_files([*urls, *urls], checksums, 50) == [*urls, *urls]
    assert sorted(requested) == ["corpus/0.bin", "corpus/1.bin"]


def test_a_damaged_or_missing_file_is_named(shards: Shards, bucket: Any) -> None:
    _, urls, checksums = shards
    bucket.pipe_file("corpus/1.bin", b"x" * 14)
    with pytest.raises(UserError, match=r"s3://corpus/1\.bin is damaged"):
        fetch_files(urls[1:2], checksums, 1000)
    bucket.rm_file("corpus/2.bin")
    with pytest.raises(UserError, match=r"s3://corpus/2\.bin cannot be read"):
        fetch_files(urls[2:], checksums, 1000)
    with pytest.raises(UserError, match=r"s3://corpus/2\.bin cannot be read"):
        TokenShards(urls[2:], 300)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(st.integers(0, 90), st.integers(0, 90))
def test_slices_of_remote_shards_equal_those_of_local_ones(shards: Shards, start: int, stop: int) -> None:
    paths, urls, _ = shards
    local, remote, mixed = TokenShards(paths, 300), TokenShards(urls, 300), TokenShards([urls[0], *paths[1:]], 300)
    assert (local.is_remote, remote.is_remote, mixed.is_remote) == (False, True, True)
    np.testing.assert_array_equal(remote[start:stop], local[start:stop])
    np.testing.assert_array_equal(mixed[start:stop], local[start:stop])


def test_a_batch_of_remote_shards_equals_that_of_local_ones(shards: Shards) -> None:
    paths, urls, _ = shards
    starts = [70, 3, 45, 0, 50]
    for remote, local in zip(
        gather_batch(TokenShards(urls, 300), starts, 12, "cpu"),
        gather_batch(TokenShards(paths, 300), starts, 12, "cpu"),
        strict=True,
    ):
        assert remote.equal(local)


def test_a_shard_that_was_cut_short_is_named(shards: Shards, bucket: Any) -> None:
    _, urls, _ = shards
    tokens = TokenShards(urls, 300)
    bucket.pipe_file("corpus/0.bin", b"x" * 10)
    for start in (0, 20):  # the second begins after the end
        with pytest.raises(UserError, match=r"s3://corpus/0\.bin was truncated"):
            tokens[start:50]


def test_a_directory_is_fetched(shards: Shards, bucket: Any) -> None:
    bucket.pipe_file("corpus/tokenizer/vocab.json", b"{}")
    assert (Path(fetch_directory("s3://corpus/tokenizer")) / "vocab.json").read_bytes() == b"{}"
    assert fetch_directory("/a/b") == "/a/b"
    with pytest.raises(UserError, match="s3://corpus/nothing cannot be read"):
        fetch_directory("s3://corpus/nothing")
    assert read_file("s3://corpus/tokenizer/vocab.json") == b"{}"


def test_a_directory_is_fetched_once_until_it_changes(
    shards: Shards, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe_file("corpus/tokenizer/vocab.json", b"{}")
    first = fetch_directory("s3://corpus/tokenizer")
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "get_file", lambda *arguments: pytest.fail("the directory is fetched again"))
        assert fetch_directory("s3://corpus/tokenizer") == first
    bucket.pipe_file("corpus/tokenizer/vocab.json", b"[]")
    changed = Path(fetch_directory("s3://corpus/tokenizer"))
    assert {path.name: path.read_bytes() for path in changed.iterdir()} == {"vocab.json": b"[]"}


def test_an_interrupted_fetch_of_a_directory_leaves_none(
    shards: Shards, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"merges.txt": b"a b", "vocab.json": b"{}"}
    for name, data in files.items():
        bucket.pipe_file(f"corpus/tokenizer/{name}", data)
    get_file = type(bucket).get_file

    def fail_at_second(fs: Any, source: str, target: str) -> None:
        if source.endswith("vocab.json"):
            raise PermissionError("broken")
        get_file(fs, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "get_file", fail_at_second)
        with pytest.raises(UserError, match="s3://corpus/tokenizer cannot be used: broken"):
            fetch_directory("s3://corpus/tokenizer")
    fetched = Path(fetch_directory("s3://corpus/tokenizer"))
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == files


def test_a_request_that_fails_once_is_repeated(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from botocore.exceptions import EndpointConnectionError  # of the extra s3, as the bucket is

    _, urls, _ = shards
    fs, path = open_filesystem(urls[0])
    failures = [EndpointConnectionError(endpoint_url="http://store")]
    original = fs.cat_file

    def cat_file(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*arguments, **options)

    monkeypatch.setattr(fs, "cat_file", cat_file)
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    assert read_range(urls[0], 2, 6) == fs.cat_file(path)[2:6]
    assert "cannot be reached" in caplog.text
    failures = [EndpointConnectionError(endpoint_url="http://store") for _ in range(9)]
    with pytest.raises(UserError, match=r"s3://corpus/0\.bin cannot be reached"):
        read_file(urls[0])
