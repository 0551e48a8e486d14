"""``textmill verify`` and ``textmill gc``: what they find below a root, and what gc deletes."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tenacity import wait_none

from lm.checkpoint.training_checkpoint import read_description
from lm.common.errors import TransientError, UserError
from lm.files import retry
from tasks.maintenance.gc import delete, find_garbage
from tasks.maintenance.verify import verify
from tasks.runtime.locks import is_locked, lock_root
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import Stage
from tasks.runtime.store import Store
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT, python_process, read_line
from tests.helpers.roots import letters, materialize, run_context, upper, write_run_record
from tests.helpers.training import small_trainer, write_job
from textmill.cli.main import main

ROOT_USER = """
import sys
from tasks.runtime.locks import lock_root
from tasks.runtime.store import Store
with lock_root(Store(sys.argv[1]), exclusive=sys.argv[2] == "exclusive"):
    print("locked", flush=True)
    sys.stdin.read()
"""

LOCK_HOLDER = """
import fcntl, sys
with open(sys.argv[1]) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    print("locked", flush=True)
    sys.stdin.read()
"""


def make_root(root: Path | str) -> tuple[RunContext, Ref, Ref]:
    """Make a root with the record of a run that used two outputs."""
    run = run_context(root)
    low = materialize(letters, run, "x", 3)
    high = materialize(upper, run, low, [materialize(letters, run, "part", 1)])  # the run record does not name the part
    write_run_record(run, "20260101-000000-full-a", low, high)
    return run, low, high


def find_kinds(store: Store) -> dict[str, str]:
    """Return the kind of each finding of verify by its path."""
    return {finding.path: finding.kind for finding in verify(store)}


def garbage_paths(store: Store) -> set[str]:
    return {finding.path for finding in find_garbage(store)}


@pytest.mark.parametrize("where", ["disk", "memory", "s3"])
def test_an_intact_root_has_no_findings(tmp_path: Path, where: str, request: pytest.FixtureRequest) -> None:
    if where == "s3":
        request.getfixturevalue("bucket")
    root = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}", "s3": "s3://corpus/intact"}[where]
    run, low, _ = make_root(root)
    for name in ("README.md", ".gitignore"):  # as in a root that is kept in git
        run.store.fs.pipe_file(run.store.path(name), b"a note")
    assert find_kinds(run.store) == {}
    assert find_garbage(run.store) == []
    path = (*read_output(run.store, low).location, "a.txt")
    run.store.fs.pipe_file(run.store.path(*path), b"xxy")
    run.store.fs.pipe_file(run.store.path("letters", "note.txt"), b"a note")
    assert find_kinds(run.store) == {"/".join(path): "damaged", "letters/note.txt": "orphaned"}


def test_verify_names_each_kind_of_damage(tmp_path: Path) -> None:
    run, low, high = make_root(tmp_path)
    output = read_output(run.store, low)
    a, b, time = (output.path(name) for name in ("a.txt", "sub/b.txt", "time.txt"))
    before = a.stat()
    a.write_text("xxy")
    os.utime(a, ns=(before.st_atime_ns, before.st_mtime_ns))  # like bit rot on a disk
    b.unlink()
    time.write_text("longer than it was before")
    manifest = Path(run.store.path(*high, "manifest.json"))
    manifest.write_text(manifest.read_text().replace('"run": "test"', '"run": "tesu"'))
    problems = {finding.path: finding.problem for finding in verify(run.store) if finding.kind == "damaged"}
    attempt = "/".join(output.location)
    assert problems == {
        f"{attempt}/a.txt": "its content has changed",
        f"{attempt}/sub/b.txt": "it is missing",
        f"{attempt}/time.txt": "it has 25 bytes instead of 16",
        f"{'/'.join(high)}/manifest.json": "it is not a valid manifest",
        "runs/20260101-000000-full-a.json": f"it names {'/'.join(high)}, which is missing; "
        "run that again, or delete this",
    }


def test_unfinished_and_orphaned_files_are_distinguished(tmp_path: Path) -> None:
    run, low, _ = make_root(tmp_path)
    before = read_output(run.store, low)
    materialize(letters, run_context(tmp_path, refresh=frozenset({"letters"})), "x", 3)
    after = read_output(run.store, low)

    def body(out: Attempt, text: str) -> None:
        raise RuntimeError("stop")

    failing = Stage("failing", body, is_resumable=True)
    with pytest.raises(RuntimeError):
        materialize(failing, run, "x")
    (unfinished,) = tmp_path.glob("failing/*/*")
    (tmp_path / "runs" / f"a.json.{'ab' * 16}.tmp").write_text("cut o")
    Path(after.url, "more.txt").write_text("a note")
    (tmp_path / "letters" / low.key / "folder").mkdir()
    (tmp_path / "note.md").write_text("a note")
    assert find_kinds(run.store) == {
        "/".join(before.location): "orphaned",
        unfinished.relative_to(tmp_path).as_posix(): "unfinished",
        f"runs/a.json.{'ab' * 16}.tmp": "orphaned",
        f"{'/'.join(after.location)}/more.txt": "orphaned",
        f"letters/{low.key}/folder": "orphaned",
        "note.md": "orphaned",
    }
    with lock_root(run.store, exclusive=True):
        assert all(delete(run.store, finding) for finding in find_garbage(run.store))
    assert not Path(before.url).exists()
    assert not unfinished.parent.exists()
    assert not list(tmp_path.rglob("*.tmp"))
    foreign = {f"{'/'.join(after.location)}/more.txt", f"letters/{low.key}/folder", "note.md"}
    assert set(find_kinds(run.store)) == foreign, "gc deletes only files of runs"
    assert after.is_intact()


def test_gc_keeps_what_a_run_record_needs_and_deletes_the_rest(tmp_path: Path) -> None:
    run, low, high = make_root(tmp_path)
    same_content = materialize(letters, run, "xxx", 1)  # may be the input of ``high`` instead of ``low``
    other = materialize(letters, run, "other", 1)
    assert garbage_paths(run.store) == {"/".join(other)}
    write_run_record(run, "20260102-000000-full-b", other)
    assert garbage_paths(run.store) == set()
    (tmp_path / "runs" / "20260101-000000-full-a.json").unlink()
    part = materialize(letters, run, "part", 1)
    outputs = {"/".join(ref) for ref in (low, same_content, high, part)}
    assert garbage_paths(run.store) == outputs | {"runs/20260101-000000-full-a.md"}
    with lock_root(run.store, exclusive=True):
        assert all(delete(run.store, finding) for finding in find_garbage(run.store))
    assert [path.name for path in tmp_path.glob("*/*/manifest.json") if path.parent.name != other.key] == []
    assert not (tmp_path / "upper" / high.key).exists()
    assert read_output(run.store, other).is_intact()
    assert find_kinds(run.store) == {}


@pytest.mark.parametrize("damaged", ["manifest", "record", "missing manifest"])
def test_gc_deletes_nothing_while_a_record_is_damaged(tmp_path: Path, damaged: str) -> None:
    run, _, high = make_root(tmp_path)
    if damaged == "record":
        (tmp_path / "runs" / "20260101-000000-full-a.json").write_text("{")
    elif damaged == "manifest":
        (tmp_path / "upper" / high.key / "manifest.json").write_text("{")
    else:
        shutil.rmtree(tmp_path / "upper" / high.key)
    with pytest.raises(UserError, match=r"is damaged: .*nothing can be deleted"):
        find_garbage(run.store)


def test_gc_deletes_nothing_where_records_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, *_ = make_root(tmp_path / "root")
    runs, moved = Path(run.store.path("runs")), tmp_path / "runs"
    runs.rename(moved)
    runs.symlink_to(moved)
    with pytest.raises(UserError, match=r"runs is damaged: .* is a link"):
        find_garbage(run.store)
    runs.unlink()
    moved.rename(runs)
    assert find_garbage(run.store) == []
    scandir = os.scandir

    def fail(path: str) -> Any:
        if Path(path) == runs:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(UserError, match="Permission denied"):
        find_garbage(run.store)


def test_notes_of_a_user_are_no_garbage(tmp_path: Path) -> None:
    run, *_ = make_root(tmp_path)
    (tmp_path / "runs" / "notes.md").write_text("the first run was best")
    (tmp_path / "empty").mkdir()
    assert find_kinds(run.store) == {"runs/notes.md": "orphaned", "empty": "orphaned"}
    assert find_garbage(run.store) == []
    (tmp_path / "new").mkdir()
    assert find_kinds(Store(str(tmp_path / "new"))) == {}


def test_a_record_without_a_report_is_unfinished(tmp_path: Path) -> None:
    run, low, _ = make_root(tmp_path)
    stages = {"letters": {"key": low.key, "state": "made", "seconds": 1.0}}
    run.store.write_json({"name": "b", "stages": stages, "report": None}, "runs", "b.json")
    run.store.write_text("half of", "runs", "b.md")
    assert find_kinds(run.store) == {"runs/b.json": "unfinished", "runs/b.md": "unfinished"}


def test_gc_refuses_a_root_in_use_and_a_run_waits_for_gc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, *_ = make_root(tmp_path)
    other = materialize(letters, run, "other", 1)
    arguments = (ROOT_USER, tmp_path, "shared")
    with python_process(*arguments) as first, python_process(*arguments) as second:
        assert [read_line(first), read_line(second)] == ["locked", "locked"]
        assert main(["gc", "--root", str(tmp_path), "--delete"]) == 2
        assert "A run or another gc uses" in capsys.readouterr().err
        assert main(["gc", "--root", str(tmp_path)]) == 0, "listing needs no lock"
        first.kill()
        first.wait()
        assert main(["gc", "--root", str(tmp_path), "--delete"]) == 2
    assert read_output(run.store, other).is_intact()
    with python_process(ROOT_USER, tmp_path, "exclusive") as holder:
        assert read_line(holder) == "locked"
        with python_process(ROOT_USER, tmp_path, "shared") as waiting:
            holder.kill()
            assert read_line(waiting) == "locked"
    assert main(["gc", "--root", str(tmp_path), "--delete"]) == 0
    assert not Path(run.store.path(*other)).exists()


def test_without_locks_a_root_can_be_shared_but_not_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    store = Store(str(tmp_path))
    with lock_root(store), lock_root(store):
        pass
    with pytest.raises(UserError, match=r"no locks.*: Operation not supported"), lock_root(store, exclusive=True):
        pass
    (tmp_path / "job.json").touch()
    assert not is_locked(tmp_path / "job.json", is_required=False)
    with pytest.raises(UserError, match=r"no locks.*: Operation not supported"):
        is_locked(tmp_path / "job.json")


def test_a_lock_is_seen_where_exclusive_locks_need_a_writable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / "job.json").touch()
    assert not is_locked(tmp_path / "job.json")
    os.mkfifo(tmp_path / "pipe")
    assert not is_locked(tmp_path / "pipe")  # and does not wait for a writer


def test_an_unreachable_root_is_not_reported_as_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, *_ = make_root(f"memory://{tmp_path.name}")
    monkeypatch.setattr(retry.retry_request, "wait", wait_none())
    for operation in ("cat_file", "open"):
        with monkeypatch.context() as patch:

            def fail(path: str, *rest: object) -> None:
                raise ConnectionResetError("gone")

            patch.setattr(run.store.fs, operation, fail)
            with pytest.raises(TransientError):
                list(verify(run.store))


def test_a_killed_run_is_unfinished(tmp_path: Path) -> None:
    run, low, _ = make_root(tmp_path)
    stages = {"letters": {"key": low.key, "state": "made", "seconds": 1.0}}
    run.store.write_json({"name": "b", "stages": stages}, "runs", "b.json")
    run.store.write_text("half of", "runs", "b.md")
    assert find_kinds(run.store) == {"runs/b.json": "unfinished", "runs/b.md": "unfinished"}
    assert find_garbage(run.store) == []
    Path(run.root, "runs", "20260101-000000-full-a.md").write_text("a reporT")
    assert find_kinds(run.store)["runs/20260101-000000-full-a.md"] == "damaged"


def test_gc_only_lists_garbage_on_a_store_without_conditional_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, *_ = make_root(f"memory://{tmp_path.name}")
    other = materialize(letters, run, "other", 1)
    assert main(["gc", "--root", f"memory://{tmp_path.name}"]) == 0
    assert other.key in capsys.readouterr().out
    monkeypatch.setattr(Store, "create_file", lambda self, data, *parts: True)
    assert main(["gc", "--root", f"memory://{tmp_path.name}", "--delete"]) == 2
    assert "has no conditional writes" in capsys.readouterr().err
    assert read_output(run.store, other).is_intact()


def test_the_commands_print_their_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, low, _ = make_root(tmp_path)
    assert main(["verify", "--root", str(tmp_path)]) == 0
    assert "All outputs under" in capsys.readouterr().out
    other = materialize(letters, run, "other", 1000)
    assert main(["gc", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"5.0 kB  letters/{other.key}: no run record needs it" in out
    assert "1 in all, 5.0 kB. Nothing is deleted yet" in out
    read_output(run.store, low).path("a.txt").write_text("xxy")
    assert main(["verify", "--root", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"damaged     {'/'.join(read_output(run.store, low).location)}/a.txt: its content has changed\n" in out
    assert "1 damaged" in out
    for command in (["verify"], ["gc"], ["gc", "--delete"]):
        assert main([*command, "--root", str(tmp_path / "nowhere")]) == 2
        assert "There is no root at" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def train(run: RunContext, is_flipped: bool) -> Ref:
    """Make an output with checkpoints. Optionally flip a byte of one before the manifest is written."""

    def body(out: Attempt, text: str) -> None:
        small_trainer(out.directory, steps=4, checkpoint_interval=2, eval_interval=4).run()
        weights = out.directory / "step-0000004" / "model.safetensors"
        if is_flipped:
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")

    return materialize(Stage("train", body), run, str(is_flipped))


def test_verify_compares_a_checkpoint_with_its_description(tmp_path: Path) -> None:
    run = run_context(tmp_path)
    train(run, is_flipped=False)
    assert find_kinds(run.store) == {}
    changed = train(run, is_flipped=True)
    (path,) = find_kinds(run.store)
    assert path.startswith("/".join(changed))
    assert path.endswith("/step-0000004/checkpoint.json")


def test_gc_names_a_resumable_checkpoint_and_keeps_a_running_training(tmp_path: Path) -> None:
    run = RunContext(str(tmp_path), "run")

    def body(out: Attempt, text: str) -> None:
        small_trainer(out.directory, steps=4, checkpoint_interval=2).run()
        (out.directory / "job.json").write_text("{}")
        raise RuntimeError("power failure")

    with pytest.raises(RuntimeError):
        materialize(Stage("train", body, is_resumable=True), run, "a")
    (finding,) = find_garbage(run.store)
    assert finding.problem.endswith("the same training would resume from its step-0000004")
    with python_process(LOCK_HOLDER, tmp_path / finding.path / "job.json") as training:
        assert read_line(training) == "locked"
        assert not delete(run.store, finding)
        assert read_description(tmp_path / finding.path / "step-0000004")
    assert delete(run.store, finding)
    assert not (tmp_path / finding.path).exists()


@pytest.mark.slow
def test_lm_train_locks_its_job_file(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=1_000_000)
    assert not is_locked(job)
    with subprocess.Popen([sys.executable, "-m", "lm.train", str(job)], cwd=PROJECT) as process:
        wait_for(lambda: is_locked(job), 120, "lock of the training")
        process.terminate()
    assert not is_locked(job)
