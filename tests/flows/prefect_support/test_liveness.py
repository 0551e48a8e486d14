"""Runs whose process died: the next run reports them to Prefect as crashed."""

import os
import signal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled

from flows.prefect_support import liveness
from flows.prefect_support.liveness import exit_if_server_is_gone, hold_liveness_lock
from tests.helpers.processes import python_process, read_line

HOLD_LOCK = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@flow
def empty_flow() -> None:
    pass


@task
def empty_task() -> None:
    pass


@pytest.fixture
def locks(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the locks, with the lock of a live run: this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_id = str(uuid4())
    hold_liveness_lock(run_id, 1)
    return next(tmp_path.glob(f"textmill/runs/*/{run_id}_1.lock")).parent


def create_run(state: State[Any]) -> UUID:
    """Create a flow run in a state, with a task run that is Running and another that is Completed."""
    with get_client(sync_client=True) as client:
        run_id = client.create_flow_run(empty_flow).id
        task_states: list[State[Any]] = [Running(), Completed()]
        for number, task_state in enumerate(task_states):
            client.create_task_run(empty_task, run_id, str(number), name=task_state.name, state=task_state)
        client.set_flow_run_state(run_id, state, force=True)
    return run_id


def states(run_id: UUID) -> tuple[str | None, dict[str, str | None]]:
    """Return the state of a flow run, and the states of its task runs by their original state."""
    with get_client(sync_client=True) as client:
        task_runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
        return client.read_flow_run(run_id).state_name, {run.name: run.state_name for run in task_runs}


@pytest.mark.parametrize(
    ("before", "after"), [(Running(), "Crashed"), (Cancelling(), "Cancelled"), (Completed(), "Completed")], ids=str
)
def test_a_dead_run_gets_a_final_state(locks: Path, before: State[Any], after: str) -> None:
    dead = create_run(before)
    lock = locks / f"{dead}_1.lock"
    lock.touch()
    hold_liveness_lock(str(uuid4()), 1)
    assert states(dead) == (after, {"Running": "Crashed", "Completed": "Completed"})
    assert not lock.exists()


def test_a_live_run_keeps_its_state_until_its_process_is_killed(locks: Path) -> None:
    live = create_run(Running())
    lock = locks / f"{live}_1.lock"
    with python_process(HOLD_LOCK, lock) as process:
        assert read_line(process) == "locked"
        hold_liveness_lock(str(uuid4()), 1)
        assert states(live) == ("Running", {"Running": "Running", "Completed": "Completed"})
        assert lock.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    hold_liveness_lock(str(uuid4()), 1)
    assert states(live)[0] == "Crashed"


@pytest.mark.parametrize("state", [Scheduled(), Pending()], ids=str)
def test_a_run_that_waits_for_its_next_start_keeps_its_state(locks: Path, state: State[Any]) -> None:
    waiting = create_run(state)
    (locks / f"{waiting}_1.lock").touch()
    hold_liveness_lock(str(uuid4()), 1)
    assert states(waiting)[0] == state.name
    assert not (locks / f"{waiting}_1.lock").exists()


def test_a_restarted_run_keeps_its_state_when_its_first_start_died(locks: Path) -> None:
    restarted = create_run(Running())
    (locks / f"{restarted}_0.lock").touch()
    hold_liveness_lock(str(uuid4()), 1)
    assert states(restarted)[0] == "Running"
    assert not (locks / f"{restarted}_0.lock").exists()


def test_the_lock_of_an_unknown_run_is_kept_for_a_month(locks: Path) -> None:
    """The run may belong to another database that was at the same address."""
    new, old = (locks / f"{uuid4()}_1.lock" for _ in range(2))
    new.touch()
    old.touch()
    os.utime(old, (0, 0))
    hold_liveness_lock(str(uuid4()), 1)
    assert new.exists()
    assert not old.exists()


def test_each_database_has_its_own_lock_directory(
    prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(2):
        database = {PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{number}.db", PREFECT_API_URL: None}
        with temporary_settings(database):
            hold_liveness_lock(str(uuid4()), 1)
    assert len(list(tmp_path.glob("textmill/runs/*/*.lock"))) == 2
    assert len(list(tmp_path.glob("textmill/runs/*"))) == 2


@pytest.mark.parametrize("port", ["9", ""], ids=["server-gone", "no-server"])
def test_a_process_exits_at_once_if_its_server_is_gone(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api" if port else None}):
        monkeypatch.setattr(liveness, "_held_locks", [])
        exit_if_server_is_gone(3)
        assert not codes, "no flow ran in this process"
        monkeypatch.setattr(liveness, "_held_locks", [object()])
        exit_if_server_is_gone(3)
    assert codes == ([3] if port else [])
    assert ("server does not respond" in capsys.readouterr().err) == bool(port)
