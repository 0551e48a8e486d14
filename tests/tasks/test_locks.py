"""The lock of an output, the attempts that killed and failed runs leave, and the slots of trainings."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tenacity import wait_none

from lm.common.errors import Stopped, UserError
from lm.files import retry
from tasks.maintenance.verify import verify
from tasks.runtime import locks
from tasks.runtime.execution import Execution
from tasks.runtime.locks import _open_lock_file, is_locked, lock_output, training_slot
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage, stage
from tasks.runtime.store import LOCK_FILE, Store
from tests.helpers.processes import PROJECT, python_process, read_line
from tests.helpers.roots import materialize, run_context

SLOW_STAGE = """
import sys
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Stage

def body(out, text):
    (out.directory / "started.txt").write_text(text)
    print("started", flush=True)
    sys.stdin.readline()
    (out.directory / "text.txt").write_text(text)

slow = Stage("slow", body, is_resumable=True)
slow.materialize(RunContext(sys.argv[1], sys.argv[2]), {"text": "x"})
print("finished", flush=True)
"""


def start_slow_stage(root: Path, name: str) -> "subprocess.Popen[str]":
    """Start a process whose stage finishes once it reads a line. A stage needs a source file, so it runs a script."""
    script = root.parent / "slow_stage.py"
    script.write_text(SLOW_STAGE)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command, pipe = [sys.executable, str(script), str(root), name], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def finish(process: "subprocess.Popen[str]") -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    assert read_line(process) == "finished"


def test_a_second_run_waits_and_uses_the_output_of_the_first(tmp_path: Path) -> None:
    with start_slow_stage(tmp_path / "root", "1") as first, start_slow_stage(tmp_path / "root", "2") as second:
        lines: list[Any] = []
        for process in (first, second):
            threading.Thread(
                target=lambda process=process: lines.append((process, read_line(process))), daemon=True
            ).start()
        while not lines:
            time.sleep(0.05)
        time.sleep(0.5)
        assert len(lines) == 1, "the other process waits"
        finish(lines[0][0])
        while len(lines) < 2:
            time.sleep(0.05)
        assert lines[1][1] == "finished", "it used the cached output"
    assert len(list(tmp_path.glob("root/slow/*/*/text.txt"))) == 1
    assert not list(tmp_path.rglob(LOCK_FILE)), "the lock file is deleted"


def test_a_killed_run_frees_its_lock_and_leaves_its_attempt(tmp_path: Path) -> None:
    with start_slow_stage(tmp_path / "root", "first") as first:
        assert read_line(first) == "started"
        first.kill()
    (unfinished,) = tmp_path.glob("root/slow/*/*/started.txt")
    assert list(tmp_path.rglob(LOCK_FILE))
    with start_slow_stage(tmp_path / "root", "second") as second:
        assert read_line(second) == "started"
        finish(second)
    assert unfinished.exists()
    assert not list(tmp_path.rglob(LOCK_FILE))


def test_verify_reports_the_lock_file_of_a_killed_run_only(tmp_path: Path) -> None:
    run = run_context(tmp_path / "root")
    with start_slow_stage(tmp_path / "root", "first") as first:
        assert read_line(first) == "started"
        assert {finding.kind for finding in verify(run.store)} == {"unfinished"}
        first.kill()
    findings = {finding.path.rpartition("/")[2]: finding for finding in verify(run.store)}
    assert findings[LOCK_FILE].problem == "a process was killed while it held this lock"
    assert findings[LOCK_FILE].is_garbage


def test_verify_reports_no_lock_file_that_its_holder_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_context(tmp_path / "root")
    lock = tmp_path / "root/slow" / ("0" * 64) / LOCK_FILE

    def list_files(store: Store) -> dict[str, int]:
        with lock_output(lock, "slow", run.stopping):
            return {lock.relative_to(tmp_path / "root").as_posix(): 0}

    monkeypatch.setattr(Store, "list_files", list_files)
    assert list(verify(run.store)) == []


def test_a_wait_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    stopping = threading.Event()
    with lock_output(tmp_path / "lock", "x", threading.Event()):
        threading.Timer(0.3, stopping.set).start()
        with pytest.raises(Stopped), lock_output(tmp_path / "lock", "x", stopping):
            pytest.fail("two threads hold the lock")


def test_one_thread_at_a_time_holds_the_lock_although_its_file_is_deleted(tmp_path: Path) -> None:
    holders: list[int] = []
    counts: list[int] = []  # an assert would only end its thread

    def hold_lock() -> None:
        with lock_output(tmp_path / "lock", "x", threading.Event()):
            holders.append(1)
            counts.append(len(holders))
            time.sleep(0.01)
            holders.pop()

    threads = [threading.Thread(target=hold_lock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 8
    assert not (tmp_path / "lock").exists()


def test_a_lock_file_that_its_holder_deletes_after_another_opened_it_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on the deleted file would keep nobody out: the next one makes a new file."""
    lock, opened = tmp_path / "lock", list[int]()

    def open_lock_file(path: Path, flags: int) -> int:
        opened.append(_open_lock_file(path, flags))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(locks, "_open_lock_file", open_lock_file)
    with lock_output(lock, "x", threading.Event()):
        assert is_locked(lock)


def test_an_error_is_not_hidden_if_the_lock_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root may have become read-only, such as an immutable directory."""

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    lock = tmp_path / "lock"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the error"):
        patch.setattr(Path, "unlink", unlink)
        with lock_output(lock, "x", threading.Event()):
            raise UserError("the error")
    assert lock.exists()
    with lock_output(lock, "x", threading.Event()):
        pass
    assert not lock.exists()


def test_a_failed_attempt_of_a_stage_that_cannot_resume_is_deleted(tmp_path: Path) -> None:
    @stage("failing")
    def failing(out: Attempt, text: str) -> None:
        (out.directory / "large.bin").write_bytes(b"x" * 1000)
        raise UserError("no")

    with pytest.raises(UserError):
        materialize(failing, run_context(tmp_path), "x")
    assert not list(tmp_path.rglob("large.bin"))


class FailingUploads:
    """A remote root whose uploads fail. Counts uploads and calls of the body."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(retry.retry_request, "wait", wait_none())
        self.directory = tmp_path / "cache" / "textmill" / "uploads"
        self.uploads = 0
        self.body_calls = 0
        self.run = RunContext("memory://root-lock-test", "test")
        monkeypatch.setattr(self.run.store.fs, "put_file", self.fail)

    def fail(self, *arguments: Any, **options: Any) -> None:
        self.uploads += 1
        raise ConnectionError("gone")

    def body(self, out: Attempt, text: str) -> None:
        self.body_calls += 1
        (out.directory / "text.txt").write_text(text)


@pytest.mark.parametrize("is_resumable", [False, True])
def test_a_failed_upload_is_tried_four_times_without_repeating_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_resumable: bool
) -> None:
    failing = FailingUploads(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="cannot be reached"):
        materialize(Stage("uploaded", failing.body, is_resumable=is_resumable), failing.run, "x")
    assert (failing.uploads, failing.body_calls) == (4, 1)
    assert len(list(failing.directory.rglob("text.txt"))) == (1 if is_resumable else 0)


def test_old_failed_uploads_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = Store("memory://root-lock-test")
    old, recent = (store.create_attempt_directory("train", "a" * 64, name) for name in ("old", "recent"))
    (old / "model.bin").write_text("x")
    os.utime(old, (0, 0))
    store.remove_old_uploads()
    assert not old.exists()
    assert recent.exists()
    local_store = Store(str(tmp_path / "root"))
    attempt = local_store.create_attempt_directory("train", "a" * 64, "old")
    os.utime(attempt, (0, 0))
    local_store.remove_old_uploads()
    assert attempt.exists(), "a local root has no uploads"


TRAINING = """
import logging, sys
from tasks.runtime.execution import Execution
from tasks.runtime.run_context import RunContext
from tasks.runtime.locks import training_slot
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
with training_slot(RunContext("root", "run", execution=Execution(max_trainings=int(sys.argv[1])))):
    print("started", flush=True)
    sys.stdin.read()
"""


def close_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize("end", [close_input, subprocess.Popen.kill], ids=["ended", "killed"])
@pytest.mark.parametrize("limit", [1, 2])
def test_a_training_waits_while_too_many_run(
    limit: int, end: Callable[[subprocess.Popen[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        first, *others = [stack.enter_context(python_process(TRAINING, limit)) for _ in range(limit)]
        assert [read_line(process) for process in (first, *others)] == ["started"] * limit
        waiting = stack.enter_context(python_process(TRAINING, limit))
        assert read_line(waiting).startswith("Waiting for another training on this machine")
        end(first)
        assert read_line(waiting) == "started"
        assert [process.poll() for process in others] == [None] * (limit - 1)


def test_a_training_that_waits_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = RunContext(str(tmp_path), "run", execution=Execution(max_trainings=1))
    stopping = threading.Timer(0.2, run.stopping.set)
    with training_slot(run):
        stopping.start()
        with pytest.raises(Stopped), training_slot(run):
            raise AssertionError("the slot is taken")


def test_no_training_waits_with_a_limit_of_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        processes = [stack.enter_context(python_process(TRAINING, 0)) for _ in range(3)]
        assert [read_line(process) for process in processes] == ["started"] * 3
