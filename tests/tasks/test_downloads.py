"""Local copies of the files of a remote root."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lm.common.errors import UserError
from lm.files.remote_copies import remove_old_copies
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.helpers.roots import letters, materialize


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all downloads. The cache is empty at first."""
    paths: list[str] = []
    get_file = MemoryFileSystem.get_file

    def spy(self: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        paths.append(path.rpartition("/")[2])
        time.sleep(0.05)  # other threads ask for the same file meanwhile
        get_file(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", spy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return paths


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    yield f"memory://{tmp_path.name}"
    MemoryFileSystem().rm(f"/{tmp_path.name}", recursive=True)


def output(root: str, ref: Ref) -> Output:
    """Open an output as another process does."""
    return read_output(RunContext(root, "later").store, ref)


@pytest.mark.usefixtures("downloads")
def test_a_cache_that_cannot_be_written_is_named(root: str, tmp_path: Path) -> None:
    ref = materialize(letters, RunContext(root, "run"), "x", 3)
    (tmp_path / "cache" / "textmill" / "downloads").write_text("in the way")
    with pytest.raises(UserError, match=r"The copy .*a\.txt cannot be written: Not a directory"):
        output(root, ref).path("a.txt")


def test_a_file_is_downloaded_once_for_all_runs(root: str, downloads: list[str]) -> None:
    ref = materialize(letters, RunContext(root, "run"), "x", 3)
    for _ in range(2):
        assert output(root, ref).path("a.txt").read_text() == "xxx"
        assert output(root, ref).directory("sub").joinpath("b.txt").read_text() == "b"
    assert downloads == ["a.txt", "b.txt"]


def test_threads_that_need_the_same_file_wait_for_one_download(root: str, downloads: list[str]) -> None:
    ref = materialize(letters, RunContext(root, "run"), "x", 3)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: output(root, ref).path("a.txt").read_text(), range(8)))
    assert texts == ["xxx"] * 8
    assert downloads == ["a.txt"]


def test_a_changed_copy_is_downloaded_again(root: str, downloads: list[str]) -> None:
    ref = materialize(letters, RunContext(root, "run"), "x", 3)
    copy = output(root, ref).path("a.txt")
    copy.write_text("xyx")
    assert output(root, ref).path("a.txt") == copy
    assert copy.read_text() == "xxx"
    assert downloads == ["a.txt", "a.txt"]


@pytest.mark.parametrize("content", [b"xyx", b"", None])
def test_a_damaged_file_of_the_root_is_refused(root: str, downloads: list[str], content: bytes | None) -> None:
    ref = materialize(letters, RunContext(root, "run"), "x", 3)
    made = output(root, ref)
    path = made.store.path(*made.location, "a.txt")
    if content is None:
        made.store.fs.rm(path)
    else:
        made.store.fs.pipe_file(path, content)
    with pytest.raises(UserError, match=r"a\.txt is damaged or missing\. Run the pipeline again"):
        made.path("a.txt")
    made.store.fs.pipe_file(path, b"xxx")
    assert made.path("a.txt").read_text() == "xxx"


def test_the_least_recently_used_copies_are_deleted(root: str, downloads: list[str]) -> None:
    refs = [materialize(letters, RunContext(root, "run"), letter, 1000) for letter in "abc"]
    copies = [output(root, ref).path("a.txt") for ref in refs]
    for copy, days in zip(copies, (3, 2, 0), strict=True):
        os.utime(copy.parent, (time.time() - days * 24 * 3600,) * 2)
    remove_old_copies(2500)
    assert [copy.exists() for copy in copies] == [False, True, True]
    output(root, refs[1]).path("a.txt")  # now used less than a day ago
    remove_old_copies(0)
    assert [copy.exists() for copy in copies] == [False, True, True]
    assert output(root, refs[0]).path("a.txt").read_text() == "a" * 1000
