"""An unchanged file is not read again to check it; a changed file is."""

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.runtime import store as store_module
from tasks.runtime import verified_files as verified_module
from tasks.runtime.execution import Execution
from tasks.runtime.output import intact_digest, open_output, read_output
from tasks.runtime.run_context import RunContext
from tasks.runtime.store import Store
from tasks.runtime.verified_files import VerifiedFiles
from tests.helpers.roots import CALLS, letters, materialize, upper


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store_module, "_CLOCK_TICK_NS", 0)  # otherwise the tests would have to wait
    verified_module._open_shared.cache_clear()
    yield
    verified_module._open_shared.cache_clear()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that collects the names of files that are read to check them."""
    names: list[str] = []
    original = Store.describe_damage

    def describe_damage(self: Store, file: dict[str, Any], *parts: str) -> str:
        names.append(file["path"])
        return original(self, file, *parts)

    monkeypatch.setattr(Store, "describe_damage", describe_damage)
    return names


def later_run(root: Path, verify: Any = "changed") -> RunContext:
    """Return the context of a run that reads the checked digests from the disk, like a new process."""
    verified_module._open_shared.cache_clear()
    return RunContext(str(root), "later", execution=Execution(verify=verify))


def test_an_output_that_was_made_here_is_not_read_again(tmp_path: Path, hashed: list[str]) -> None:
    ref = materialize(letters, RunContext(str(tmp_path / "root"), "first"), "x", 3)
    for run in (later_run(tmp_path / "root"), later_run(tmp_path / "root")):
        assert materialize(letters, run, "x", 3) == ref
    assert hashed == []
    assert CALLS == ["letters"]


def test_full_reads_every_file_once_per_run(tmp_path: Path, hashed: list[str]) -> None:
    materialize(letters, RunContext(str(tmp_path / "root"), "first"), "x", 3)
    for _ in range(2):
        run = later_run(tmp_path / "root", "full")
        materialize(letters, run, "x", 3)
        materialize(letters, run, "x", 3)
        assert sorted(hashed) == ["a.txt", "sub/b.txt", "time.txt"]
        hashed.clear()


def test_a_root_from_elsewhere_is_read_once(tmp_path: Path, hashed: list[str]) -> None:
    materialize(letters, RunContext(str(tmp_path / "old"), "first"), "x", 3)
    (tmp_path / "old").rename(tmp_path / "root")
    materialize(letters, later_run(tmp_path / "root"), "x", 3)
    assert sorted(hashed) == ["a.txt", "sub/b.txt", "time.txt"]
    materialize(letters, later_run(tmp_path / "root"), "x", 3)
    assert len(hashed) == 3
    assert CALLS == ["letters"]


@pytest.mark.parametrize("verify", ["changed", "full"])
@pytest.mark.parametrize("is_mtime_kept", [False, True], ids=["new mtime", "same mtime"])
def test_a_changed_byte_is_noticed(tmp_path: Path, verify: str, is_mtime_kept: bool) -> None:
    run = RunContext(str(tmp_path / "root"), "first")
    path = read_output(run.store, materialize(letters, run, "x", 3)).path("a.txt")
    before = path.stat()
    time.sleep(0.02)  # ctime changes in ticks of the kernel
    path.write_text("xxy")
    if is_mtime_kept:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    materialize(letters, later_run(tmp_path / "root", verify), "x", 3)
    assert CALLS == ["letters", "letters"]


def test_full_notices_bit_rot(tmp_path: Path) -> None:
    """Bit rot changes no file time. Here the fingerprint of the changed file is recorded with the old digest."""
    run = RunContext(str(tmp_path / "root"), "first")
    output = read_output(run.store, materialize(letters, run, "x", 3))
    path = output.path("a.txt")
    path.write_text("xxy")
    file = next(file for file in output.manifest["files"] if file["path"] == "a.txt")
    run.store._trust(output.location, [file], run.store._stat_files(output.location))
    materialize(letters, later_run(tmp_path / "root"), "x", 3)
    assert CALLS == ["letters"]
    materialize(letters, later_run(tmp_path / "root", "full"), "x", 3)
    assert CALLS == ["letters", "letters"]


def test_a_file_that_has_just_changed_is_not_trusted(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change again within the same tick of its file time."""
    monkeypatch.setattr(store_module, "_CLOCK_TICK_NS", 3_600_000_000_000)
    materialize(letters, RunContext(str(tmp_path / "root"), "first"), "x", 3)
    materialize(letters, later_run(tmp_path / "root"), "x", 3)
    assert sorted(hashed) == ["a.txt", "sub/b.txt", "time.txt"]


def test_on_s3_an_intact_output_is_not_downloaded(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "werkzeug")  # moto's requests
    root = "s3://corpus/root"
    run = RunContext(root, "first")
    ref = materialize(letters, run, "x", 3)
    materialize(upper, run, ref, [])
    # Another machine has no checked digests, but the manifest holds the ETags.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    verified_module._open_shared.cache_clear()
    again = RunContext(root, "again")
    caplog.clear()
    materialize(upper, again, materialize(letters, again, "x", 3), [])
    assert CALLS == ["letters", "upper"]
    downloads = {name for line in caplog.messages if (name := re.search(r"GET /corpus/\S+/(\S+) HTTP", line))}
    assert {match[1] for match in downloads} == {"manifest.json"}
    path = run.store.path(*read_output(run.store, ref).location, "a.txt")
    run.store.fs.pipe_file(path, b"xxy")
    assert read_output(RunContext(root, "later").store, ref).find_damaged() == ["a.txt"]


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt", "time.txt", "../manifest.json", "../other"])
def test_a_look_up_reads_no_manifest_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = RunContext(str(tmp_path / "root"), "first")
    calls = [letters.bind("x", number) for number in range(3)]
    refs = [letters.materialize(first, call)[0] for call in calls]
    digests = [read_output(first.store, ref).digest for ref in refs]
    assert letters.look_up(later_run(tmp_path / "root"), calls) == [(ref, True) for ref in refs]
    later = later_run(tmp_path / "root")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read_bytes", lambda self, *parts: pytest.fail(f"{parts} is read"))
        assert [intact_digest(later.store, ref) for ref in refs] == digests
        assert letters.look_up(later, calls) == [(ref, True) for ref in refs]
    path = Path(later.store.path(*read_output(later.store, refs[1]).location)) / name
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b"!")
    is_cached = [True, name == "../other", True]  # an extra file is no damage
    assert letters.look_up(later_run(tmp_path / "root"), calls) == list(zip(refs, is_cached, strict=True))
    refreshed = replace(later, refresh=frozenset(["letters"]))
    assert letters.look_up(refreshed, calls) == [(ref, False) for ref in refs]


def test_digests_are_limited_and_a_damaged_database_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "digests.sqlite"
    monkeypatch.setattr(verified_module, "_MAX_ROWS", 10)
    VerifiedFiles(path).add((f"file {number}", "fingerprint", "digest") for number in range(30))
    verified = VerifiedFiles(path)
    assert verified.digest("file 29", "fingerprint") == "digest"
    assert verified.digest("file 29", "other fingerprint") is None
    assert verified.digest("file 3", "fingerprint") is None, "the oldest rows are deleted"
    path.write_bytes(b"not a database" * 100)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    verified = VerifiedFiles(path)
    assert verified.digest("file 29", "fingerprint") is None
    verified.add([("file", "fingerprint", "digest")])
    assert VerifiedFiles(path).digest("file", "fingerprint") == "digest"


def test_without_a_cache_directory_every_file_is_read(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ref = materialize(letters, RunContext(str(tmp_path / "root"), "first"), "x", 3)
    materialize(letters, later_run(tmp_path / "root"), "x", 3)
    assert len(hashed) == 3
    assert CALLS == ["letters"]
    assert open_output(RunContext(str(tmp_path / "root"), "later").store, ref)


def test_digests_are_kept_while_another_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_module, "_BUSY_TIMEOUT_SECONDS", 0.05)
    path = tmp_path / "digests.sqlite"
    VerifiedFiles(path).add([("a", "1", "x")])
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        verified = VerifiedFiles(path)
        assert verified.digest("a", "1") == "x"
        writer.execute("COMMIT")
    verified.add([("b", "2", "y")])
    again = VerifiedFiles(path)
    assert (again.digest("a", "1"), again.digest("b", "2")) == ("x", "y")


def test_two_processes_can_write_digests(tmp_path: Path) -> None:
    one, two = VerifiedFiles(tmp_path / "digests.sqlite"), VerifiedFiles(tmp_path / "digests.sqlite")
    one.add([("a", "1", "x")])
    two.add([("b", "2", "y")])
    with sqlite3.connect(tmp_path / "digests.sqlite") as connection:
        assert sorted(connection.execute("SELECT * FROM digests")) == [("a", "1", "x"), ("b", "2", "y")]
