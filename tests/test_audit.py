"""``textmill verify`` and ``textmill gc``: what they find below a root, and what may go."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tenacity import wait_none

from flows.cli import main
from lm.checkpoint import read_description
from lm.errors import Unreachable, UserError
from tasks import store
from tasks.audit import delete, garbage, verify
from tasks.lock import in_use, is_held
from tasks.output import Ref, read_output
from tasks.stage import Draft, Run, Stage
from tasks.store import Store
from tests.deployed import PROJECT, wait_for
from tests.roots import a_run, letters, make, record, upper
from tests.test_runs import other_process, says
from tests.training import make as make_trainer
from tests.training import write_job

USER = """
import sys
from tasks.lock import in_use
from tasks.store import Store
with in_use(Store(sys.argv[1]), alone=sys.argv[2] == "alone"):
    print("in", flush=True)
    sys.stdin.read()
"""

TRAINING = """
import fcntl, sys
with open(sys.argv[1]) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    print("in", flush=True)
    sys.stdin.read()
"""


def a_root(root: Path | str) -> tuple[Run, Ref, Ref]:
    """A root with a run that has used two outputs."""
    run = a_run(root)
    low = make(letters, run, "x", 3)
    high = make(upper, run, low, [make(letters, run, "part", 1)])  # which no record names
    record(run, "20260101-000000-full-a", low, high)
    return run, low, high


def kinds(root: Store) -> dict[str, str]:
    """Kind by place of all that verify finds."""
    return {finding.place: finding.kind for finding in verify(root)}


def places(root: Store) -> set[str]:
    return {finding.place for finding in garbage(root)}


@pytest.mark.parametrize("where", ["disk", "memory", "s3"])
def test_a_root_that_is_well(tmp_path: Path, where: str, request: pytest.FixtureRequest) -> None:
    if where == "s3":
        request.getfixturevalue("bucket")
    root = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}", "s3": "s3://corpus/well"}[where]
    run, low, _ = a_root(root)
    assert kinds(run.store) == {}
    assert garbage(run.store) == []
    place = (*low, read_output(run.store, low).manifest["attempt"], "a.txt")
    run.store.fs.pipe_file(run.store.path(*place), b"xxy")
    run.store.fs.pipe_file(run.store.path("letters", "note.txt"), b"mine")
    assert kinds(run.store) == {"/".join(place): "damaged", "letters/note.txt": "orphaned"}


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    run, low, high = a_root(tmp_path)
    output = read_output(run.store, low)
    a, b, time = (output.path(name) for name in ("a.txt", "sub/b.txt", "time.txt"))
    before = a.stat()
    a.write_text("xxy")
    os.utime(a, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a disk that decays would have it
    b.unlink()
    time.write_text("longer than it was before")
    manifest = Path(run.store.path(*high, "manifest.json"))
    manifest.write_text(manifest.read_text().replace('"run": "test"', '"run": "tesu"'))
    what = {finding.place: finding.what for finding in verify(run.store) if finding.kind == "damaged"}
    attempt = "/".join(output.place)
    assert what == {
        f"{attempt}/a.txt": "its content has changed",
        f"{attempt}/sub/b.txt": "it is missing",
        f"{attempt}/time.txt": "it has 25 bytes instead of 16",
        f"{'/'.join(high)}/manifest.json": "it is not a manifest as it was written",
        "runs/20260101-000000-full-a.json": f"it names {'/'.join(high)}, which is not there; "
        "run that again, or delete this",
    }


def test_what_is_left_over_is_told_apart(tmp_path: Path) -> None:
    run, low, _ = a_root(tmp_path)
    before = read_output(run.store, low)
    make(letters, a_run(tmp_path, refresh=frozenset({"letters"})), "x", 3)
    after = read_output(run.store, low)

    def body(out: Draft, text: str) -> None:
        raise RuntimeError("stop")

    failing = Stage("failing", body)
    with pytest.raises(RuntimeError):
        failing.make(run, {"text": "x"})
    (unfinished,) = tmp_path.glob("failing/*/*")
    (tmp_path / "runs" / f"a.json.{'ab' * 16}.tmp").write_text("cut o")
    Path(after.url, "more.txt").write_text("mine")
    (tmp_path / "letters" / low.key / "folder").mkdir()
    (tmp_path / "README.md").write_text("mine")
    assert kinds(run.store) == {
        "/".join(before.place): "orphaned",
        unfinished.relative_to(tmp_path).as_posix(): "unfinished",
        f"runs/a.json.{'ab' * 16}.tmp": "orphaned",
        f"{'/'.join(after.place)}/more.txt": "orphaned",
        f"letters/{low.key}/folder": "orphaned",
        "README.md": "orphaned",
    }
    with in_use(run.store, alone=True):
        assert all(delete(run.store, finding) for finding in garbage(run.store))
    assert not Path(before.url).exists()
    assert not unfinished.parent.exists()
    assert not list(tmp_path.rglob("*.tmp"))
    mine = {f"{'/'.join(after.place)}/more.txt", f"letters/{low.key}/folder", "README.md"}
    assert set(kinds(run.store)) == mine, "what no run has made is not deleted"
    assert after.is_intact()


def test_what_a_run_needs_stays_and_what_none_needs_goes(tmp_path: Path) -> None:
    run, low, high = a_root(tmp_path)
    same = make(letters, run, "xxx", 1)  # the content of ``low``: which of both ``high`` was made from, nobody knows
    other = make(letters, run, "other", 1)
    assert places(run.store) == {"/".join(other)}
    record(run, "20260102-000000-full-b", other)
    assert places(run.store) == set()
    (tmp_path / "runs" / "20260101-000000-full-a.json").unlink()
    part = make(letters, run, "part", 1)
    assert places(run.store) == {"/".join(ref) for ref in (low, same, high, part)} | {"runs/20260101-000000-full-a.md"}
    with in_use(run.store, alone=True):
        assert all(delete(run.store, finding) for finding in garbage(run.store))
    assert [path.name for path in tmp_path.glob("*/*/manifest.json") if path.parent.name != other.key] == []
    assert not (tmp_path / "upper" / high.key).exists()
    assert read_output(run.store, other).is_intact()
    assert kinds(run.store) == {}


@pytest.mark.parametrize("damaged", ["manifest", "record", "gone"])
def test_nothing_goes_while_what_it_is_needed_for_cannot_be_read(tmp_path: Path, damaged: str) -> None:
    run, _, high = a_root(tmp_path)
    if damaged == "record":
        (tmp_path / "runs" / "20260101-000000-full-a.json").write_text("{")
    elif damaged == "manifest":
        (tmp_path / "upper" / high.key / "manifest.json").write_text("{")
    else:
        shutil.rmtree(tmp_path / "upper" / high.key)
    with pytest.raises(UserError, match=r"is damaged: .*nothing can be deleted"):
        garbage(run.store)


def test_while_a_run_uses_the_root_nothing_goes_and_the_next_run_waits_for_gc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, *_ = a_root(tmp_path)
    other = make(letters, run, "other", 1)
    with other_process(USER, tmp_path, "together") as one, other_process(USER, tmp_path, "together") as two:
        assert [says(one), says(two)] == ["in", "in"]
        assert main(["gc", str(tmp_path), "--delete"]) == 2
        assert "A run or another gc uses" in capsys.readouterr().err
        assert main(["gc", str(tmp_path)]) == 0, "looking is free"
        one.kill()
        one.wait()
        assert main(["gc", str(tmp_path), "--delete"]) == 2
    assert read_output(run.store, other).is_intact()
    with other_process(USER, tmp_path, "alone") as gc:
        assert says(gc) == "in"
        with other_process(USER, tmp_path, "together") as late:
            gc.kill()  # the lock ends with its process
            assert says(late) == "in"
    assert main(["gc", str(tmp_path), "--delete"]) == 0
    assert not Path(run.store.path(*other)).exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    root = Store(str(tmp_path))
    with in_use(root), in_use(root):
        pass
    with pytest.raises(UserError, match=r"at work there: Operation not supported"), in_use(root, alone=True):
        pass


def test_a_root_out_of_reach_is_not_taken_for_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, *_ = a_root(f"memory://{tmp_path.name}")
    monkeypatch.setattr(store.patiently, "wait", wait_none())
    for operation in ("cat_file", "open"):
        with monkeypatch.context() as patch:

            def fail(path: str, *rest: object) -> None:
                raise ConnectionResetError("gone")

            patch.setattr(run.store.fs, operation, fail)
            with pytest.raises(Unreachable):
                list(verify(run.store))


def test_a_run_that_died_is_unfinished(tmp_path: Path) -> None:
    run, low, _ = a_root(tmp_path)
    stages = {"letters": {"key": low.key, "state": "made", "seconds": 1.0}}
    run.store.write_json({"name": "b", "stages": stages}, "runs", "b.json")
    run.store.write_text("half of", "runs", "b.md")
    assert kinds(run.store) == {"runs/b.json": "unfinished", "runs/b.md": "unfinished"}
    assert garbage(run.store) == []
    Path(run.root, "runs", "20260101-000000-full-a.md").write_text("a reporT")
    assert kinds(run.store)["runs/20260101-000000-full-a.md"] == "damaged"


def test_a_root_without_locks_is_only_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, *_ = a_root(f"memory://{tmp_path.name}")
    other = make(letters, run, "other", 1)
    assert main(["gc", f"memory://{tmp_path.name}"]) == 0
    assert other.key in capsys.readouterr().out
    assert main(["gc", f"memory://{tmp_path.name}", "--delete"]) == 2
    assert "nobody can tell" in capsys.readouterr().err
    assert read_output(run.store, other).is_intact()


def test_the_commands_say_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, low, _ = a_root(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    assert "All that is below" in capsys.readouterr().out
    other = make(letters, run, "other", 1000)
    assert main(["gc", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"0.0 MB  letters/{other.key}: no run's record needs it" in out
    assert "1 in all, 0.0 MB. Nothing is deleted yet" in out
    read_output(run.store, low).path("a.txt").write_text("xxy")
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"damaged     {'/'.join(read_output(run.store, low).place)}/a.txt: its content has changed\n" in out
    assert "1 damaged below" in out
    for command in ("verify", "gc"):
        assert main([command, str(tmp_path / "nowhere")]) == 2
        assert "There is no root at" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def a_training(run: Run, is_flipped: bool) -> Ref:
    """An output with a training's checkpoints, a byte of which changed before it was described."""

    def body(out: Draft, text: str) -> None:
        make_trainer(out.directory, steps=4, checkpoint_interval=2, eval_interval=4).run()
        weights = out.directory / "step-0000004" / "model.safetensors"
        if is_flipped:
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")

    return Stage("train", body).make(run, {"text": str(is_flipped)})


def test_a_checkpoint_is_held_beside_its_own_description(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    a_training(run, is_flipped=False)
    assert kinds(run.store) == {}
    changed = a_training(run, is_flipped=True)
    (place,) = kinds(run.store)
    assert place.startswith("/".join(changed)) and place.endswith("/step-0000004/checkpoint.json")


def test_gc_tells_of_a_training_and_leaves_one_that_lm_train_is_at(tmp_path: Path) -> None:
    run = Run(str(tmp_path), "run")

    def body(out: Draft, text: str) -> None:
        make_trainer(out.directory, steps=4, checkpoint_interval=2).run()
        (out.directory / "job.json").write_text("{}")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        Stage("train", body).make(run, {"text": "a"})
    (finding,) = garbage(run.store)
    assert finding.what.endswith("the same training would go on from its step-0000004")
    code = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); print('in'); sys.stdin.read()"
    )
    with other_process(code, tmp_path / finding.place / "job.json") as training:
        assert says(training) == "in"
        assert not delete(run.store, finding)
        assert read_description(tmp_path / finding.place / "step-0000004")
    assert delete(run.store, finding)
    assert not (tmp_path / finding.place).exists()


def test_lm_train_holds_its_job(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=1_000_000)
    assert not is_held(job)
    with subprocess.Popen([sys.executable, "-m", "lm.train", str(job)], cwd=PROJECT) as process:
        wait_for(lambda: is_held(job), 120, "the training's lock")
        process.terminate()
    assert not is_held(job)
