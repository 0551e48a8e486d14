"""Leases on a root without locks: runs, gc, outputs and workers."""

import json
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm.checkpoint import mirror
from lm.common.errors import Stopped, UserError
from lm.train.pretraining import Job
from tasks.maintenance.gc import find_garbage
from tasks.maintenance.verify import verify
from tasks.runtime import locks
from tasks.runtime.locks import (
    check_lease,
    hold_gc_lease,
    hold_output_lease,
    hold_run_lease,
    own_root,
    stop_without_lease,
    training_heartbeat,
    use_root,
)
from tasks.runtime.output import read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import stage
from tasks.runtime.store import LEASES, LOCK_FILE, Store
from tests.helpers.limits import TIMEOUT_SCALE, wait_for
from tests.helpers.roots import letters, materialize, run_context, write_run_record
from tests.helpers.training import train_here, write_job
from textmill.cli.main import main


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root without locks, on which leases are short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(locks, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(locks, "_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(locks, "_LEASE_POLL_SECONDS", 0.05)
    yield f"memory://{tmp_path.name}"


def leased(root: str, name: str = "20260101-000000-full-a") -> RunContext:
    return run_context(root, lease=name)


def leave_lease(run: RunContext) -> None:
    """Write the lease and the heartbeat of a run whose process was killed."""
    for suffix in ("json", "heartbeat"):
        run.store.write_text("once", LEASES, f"{run.lease}.{suffix}")


def test_a_lease_ends_with_its_run(root: str) -> None:
    run = leased(root)
    with use_root(run):
        check_lease(run)
        first = wait_for(lambda: run.store.read_bytes(LEASES, f"{run.lease}.heartbeat"), 5, "heartbeat")
        wait_for(lambda: run.store.read_bytes(LEASES, f"{run.lease}.heartbeat") != first, 5, "second heartbeat")
    assert run.store.list_names(LEASES) == []
    with pytest.raises(Stopped, match="no lease"):
        check_lease(run)


@pytest.mark.slow
def test_gc_deletes_nothing_while_a_run_is_at_work(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = leased(root)
    with use_root(run):
        ref = materialize(letters, run, "a", 1)
        assert main(["gc", "--root", root, "--delete"]) == 2
        assert f"Run {run.lease} uses" in capsys.readouterr().err
        assert read_output(run.store, ref).is_intact()
    assert main(["gc", "--root", root, "--delete"]) == 0
    assert f"letters/{ref.key}: no run record needs it" in capsys.readouterr().out
    assert set(Store(root).list_files()) == {"letters/latest.json"}


@pytest.mark.slow
def test_gc_deletes_nothing_while_a_training_of_train_job_is_at_work(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(root)
    seen: list[int] = []
    path = write_job(tmp_path)
    job = json.loads(path.read_text()) | {"heartbeat": training_heartbeat(store, "20260101T000000-00000000")}
    path.write_text(json.dumps(job))
    store.write_text("{}", "train", "a" * 64, "20260101T000000-00000000", "job.json")

    def train(*_: Any) -> dict[str, Any]:
        seen.append(main(["gc", "--root", root, "--delete"]))
        return {}

    trainer = SimpleNamespace(resume=lambda place: True, run=train)
    monkeypatch.setattr(Job, "make_trainer", lambda self, out, device: trainer)
    monkeypatch.setattr(mirror, "_HEARTBEAT_SECONDS", 0.1)
    train_here(Job.read(path))
    assert seen == [2]
    assert "Run train-job-20260101T000000-00000000 uses" in capsys.readouterr().err
    assert store.list_names(LEASES) == []
    assert main(["gc", "--root", root, "--delete"]) == 0
    assert store.list_names("train", "a" * 64) == []
    assert training_heartbeat(Store(str(tmp_path)), "x") == "", "on a local root, lm.train locks the job"


def test_gc_keeps_what_a_run_record_needs_and_deletes_the_leases_of_dead_runs(root: str) -> None:
    run = leased(root)
    kept, lost = materialize(letters, run_context(root), "a", 1), materialize(letters, run_context(root), "b", 1)
    write_run_record(run, "20260101-000000-full-a", kept)
    leave_lease(run)
    with own_root(run.store) as check:
        check()
        assert [finding.path for finding in find_garbage(run.store)] == ["/".join(lost)]
        assert run.store.list_names(LEASES) == ["gc.heartbeat", "gc.json"]
    assert run.store.list_names(LEASES) == []


def test_a_run_waits_for_gc(root: str) -> None:
    run, order = leased(root), []
    started = threading.Event()

    def use() -> None:
        started.set()
        with use_root(run):
            order.append("run")

    with own_root(run.store):
        thread = threading.Thread(target=use)
        thread.start()
        started.wait()
        time.sleep(0.3)
        order.append("gc")
    thread.join()
    assert order == ["gc", "run"]


@pytest.mark.slow
def test_the_lease_of_a_killed_gc_delays_a_run_only_once(root: str) -> None:
    run = leased(root)
    run.store.write_text("once", LEASES, "gc.json")
    with use_root(run):
        assert not any(name.startswith("gc") for name in run.store.list_names(LEASES))
    run.store.write_text("once", LEASES, "gc.json")
    with own_root(run.store):
        pass
    assert run.store.list_names(LEASES) == []


def test_a_gc_that_stood_still_deletes_nothing(root: str) -> None:
    run = leased(root)
    with hold_gc_lease(run.store) as check:
        run.store.delete_file(LEASES, "gc.json")  # as a run does that takes the gc for dead
        with use_root(run), pytest.raises(UserError, match="stood still"):
            check()
    assert run.store.list_names(LEASES) == []


def delete_lease_at_next_heartbeat(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Delete a lease after its holder read it and before it writes the heartbeat, as if it was suspended there."""
    is_deleted, write_text = threading.Event(), Store.write_text

    def delete_and_write(store: Store, content: str, *parts: str) -> None:
        is_heartbeat = threading.current_thread() is not threading.main_thread()
        if is_heartbeat and not is_deleted.is_set():
            store.delete_file(LEASES, f"{name}.json")
        write_text(store, content, *parts)
        if is_heartbeat:
            is_deleted.set()

    monkeypatch.setattr(Store, "write_text", delete_and_write)
    return is_deleted


def test_a_run_does_not_restore_a_deleted_lease(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = leased(root)
    with hold_run_lease(run):
        assert delete_lease_at_next_heartbeat(monkeypatch, run.lease).wait(10 * TIMEOUT_SCALE)
        with pytest.raises(Stopped, match="no lease"):
            check_lease(run)
        assert run.stopping.wait(10 * TIMEOUT_SCALE)
    assert run.store.list_names(LEASES) == []


def test_gc_does_not_restore_a_deleted_lease(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(root)
    with hold_gc_lease(store) as check:
        check()
        assert delete_lease_at_next_heartbeat(monkeypatch, "gc").wait(10 * TIMEOUT_SCALE)
        with pytest.raises(UserError, match="stood still"):
            check()
    assert store.list_names(LEASES) == []


def test_a_run_that_stood_still_is_stopped_and_finishes_nothing(root: str) -> None:
    run = leased(root)

    @stage("slow")
    def slow(out: Attempt, text: str) -> None:
        run.store.delete_file(LEASES, f"{run.lease}.json")  # as gc does
        (out.directory / "a.txt").write_text(text)

    with hold_run_lease(run), pytest.raises(Stopped, match="gc took it for dead"):
        materialize(slow, run, "x")
    assert not [path for path in Store(root).list_files() if path.endswith("manifest.json")]


def test_a_worker_stops_when_its_run_has_no_lease(root: str) -> None:
    run = leased(root)
    worker: RunContext = pickle.loads(pickle.dumps(run))
    with use_root(run), stop_without_lease(worker):
        assert not worker.stopping.wait(1.0), "the driver renews the lease"
    with stop_without_lease(worker):
        assert worker.stopping.wait(5)


def test_a_worker_stops_when_its_driver_was_killed(root: str) -> None:
    run = leased(root)
    leave_lease(run)
    worker: RunContext = pickle.loads(pickle.dumps(run))
    with stop_without_lease(worker):
        assert not worker.stopping.wait(0.3)
        assert worker.stopping.wait(5), "nobody renews the lease"


def test_two_runs_make_an_output_one_after_the_other(root: str) -> None:
    first, second = leased(root, "20260101-000000-full-a"), leased(root, "20260101-000000-full-b")
    order = []

    def make_second() -> None:
        with hold_run_lease(second), hold_output_lease(second, "x", "k", name="x"):
            order.append("second")

    with hold_run_lease(first):
        with hold_output_lease(first, "x", "k", name="x"):
            thread = threading.Thread(target=make_second)
            thread.start()
            time.sleep(1.5)  # longer than a lease lasts without renewal
            order.append("first")
        thread.join()
    assert order == ["first", "second"]


def test_an_output_lease_of_a_dead_run_or_of_the_same_run_is_taken(root: str) -> None:
    dead, run = leased(root, "20260101-000000-full-a"), leased(root, "20260101-000000-full-b")
    for holder in (dead, run):
        run.store.write_text(holder.lease, "x", "k", LOCK_FILE)
        with hold_run_lease(run), hold_output_lease(run, "x", "k", name="x"):
            assert run.store.read_bytes("x", "k", LOCK_FILE) == run.lease.encode()
        assert run.store.list_names("x", "k") == []


@pytest.mark.slow
def test_of_two_runs_that_wait_for_a_dead_one_one_makes_the_output(root: str) -> None:
    dead, second, third = (leased(root, f"20260101-000000-full-{name}") for name in "abc")
    dead.store.write_text(dead.lease, "x", "k", LOCK_FILE)
    inside, most = [], []

    def make(run: RunContext) -> None:
        with hold_run_lease(run), hold_output_lease(run, "x", "k", name="x"):
            inside.append(run)
            most.append(len(inside))
            time.sleep(1.5)  # longer than a lease lasts without renewal
            inside.remove(run)

    threads = [threading.Thread(target=make, args=(run,)) for run in (second, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]


def test_a_stopped_run_does_not_wait_for_an_output(root: str) -> None:
    other, run = leased(root, "20260101-000000-full-a"), leased(root, "20260101-000000-full-b")
    with hold_run_lease(other), hold_output_lease(other, "x", "k", name="x"):
        threading.Timer(0.2, run.stopping.set).start()
        with pytest.raises(Stopped), hold_output_lease(run, "x", "k", name="x"):
            pytest.fail("two runs hold the lease")


def test_verify_reports_the_output_leases_of_dead_runs_only(root: str) -> None:
    run = leased(root)
    run.store.write_text("[]", "letters", "0" * 64, "20260101T000000-00000000", "a.txt")
    run.store.write_text(run.lease, "letters", "0" * 64, LOCK_FILE)
    with use_root(run):
        assert {finding.kind for finding in verify(run.store)} == {"unfinished"}
    findings = {finding.path.rpartition("/")[2]: finding for finding in verify(run.store)}
    assert findings[LOCK_FILE].is_garbage


def test_a_run_context_of_a_worker_keeps_the_lease(root: str) -> None:
    run = leased(root)
    sent = pickle.loads(pickle.dumps(run))
    assert sent == replace(run, stopping=sent.stopping, is_worker=True)
