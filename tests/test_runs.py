"""What the runs of a machine share: names, an end for those whose process died, and turns at training."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled

from flows import report, runs
from flows.runs import end_without_server, keep_alive, name_run
from tests.deployed import PROJECT

LOCK = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("in", flush=True)
    sys.stdin.read()
"""
TURN = """
import logging, sys
from tasks.machine import training_turn
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
with training_turn(int(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that says on its first line whether it is in, and stays until its input ends."""
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, env=dict(os.environ), stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@flow(flow_run_name=name_run)
def nothing(until: str | None = None) -> str:
    return str(flow_run.name)


@task
def part() -> None:
    """A task that a dead run may have been at."""


@pytest.mark.usefixtures("prefect_server")
def test_a_run_is_named_by_when_how_far_and_its_given_name() -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-full-[a-z]+-[a-z]+", nothing())
    assert re.fullmatch(r"\d{8}-\d{6}-merge-[a-z]+-[a-z]+", nothing("merge"))
    with get_client(sync_client=True) as client:
        given = client.create_flow_run(nothing, name="../so / ünd so")
        again = client.create_flow_run(nothing, name="20260101-000000-full-so")
    assert re.fullmatch(r"\d{8}-\d{6}-full-\.\.-so-ünd-so", str(run_flow(nothing, flow_run=given)))
    assert run_flow(nothing, flow_run=again) == "20260101-000000-full-so"


@pytest.fixture
def locks(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the locks, with one of a living run, which is this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_id = str(uuid4())
    keep_alive(run_id, 1)
    return next(tmp_path.glob(f"textmill/runs/*/{run_id}_1.lock")).parent


def made(state: object) -> UUID:
    """A flow run in a state, with a task run that is Running and one that is Completed."""
    with get_client(sync_client=True) as client:
        run_id = client.create_flow_run(nothing).id
        for number, task_state in enumerate((Running(), Completed())):
            client.create_task_run(part, run_id, str(number), name=task_state.name, state=task_state)
        client.set_flow_run_state(run_id, state, force=True)  # type: ignore[arg-type]
    return run_id


def states(run_id: UUID) -> tuple[str | None, dict[str, str | None]]:
    """The state of a flow run, and those of its task runs by what they were."""
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
        return client.read_flow_run(run_id).state_name, {found.name: found.state_name for found in tasks}


@pytest.mark.parametrize(
    ("before", "after"), [(Running(), "Crashed"), (Cancelling(), "Cancelled"), (Completed(), "Completed")], ids=str
)
def test_the_next_start_settles_a_run_whose_lock_nobody_holds(locks: Path, before: object, after: str) -> None:
    dead = made(before)
    lock = locks / f"{dead}_1.lock"
    lock.touch()
    keep_alive(str(uuid4()), 1)
    assert states(dead) == (after, {"Running": "Crashed", "Completed": "Completed"})
    assert not lock.exists()


def test_a_run_that_lives_is_left_alone_until_its_process_is_killed(locks: Path) -> None:
    living = made(Running())
    lock = locks / f"{living}_1.lock"
    with other_process(LOCK, lock) as process:
        assert says(process) == "in"
        keep_alive(str(uuid4()), 1)
        assert states(living) == ("Running", {"Running": "Running", "Completed": "Completed"})
        assert lock.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    keep_alive(str(uuid4()), 1)
    assert states(living)[0] == "Crashed"


@pytest.mark.parametrize("state", [Scheduled(), Pending()], ids=str)
def test_a_run_that_waits_to_be_started_again_is_not_settled(locks: Path, state: object) -> None:
    again = made(state)
    (locks / f"{again}_1.lock").touch()
    keep_alive(str(uuid4()), 1)
    assert states(again)[0] == state.name
    assert not (locks / f"{again}_1.lock").exists()


def test_a_run_that_was_started_again_is_not_settled_for_its_first_start(locks: Path) -> None:
    again = made(Running())
    (locks / f"{again}_0.lock").touch()
    keep_alive(str(uuid4()), 1)
    assert states(again)[0] == "Running"
    assert not (locks / f"{again}_0.lock").exists()


def test_the_lock_of_a_run_that_prefect_does_not_know_is_kept_for_a_month(locks: Path) -> None:
    """It may be of another database that was at the same address."""
    young, old = (locks / f"{uuid4()}_1.lock" for _ in range(2))
    young.touch()
    old.touch()
    os.utime(old, (0, 0))
    keep_alive(str(uuid4()), 1)
    assert young.exists()
    assert not old.exists()


def test_each_database_has_a_directory_of_its_own(
    prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(2):
        database = {PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{number}.db", PREFECT_API_URL: None}
        with temporary_settings(database):
            keep_alive(str(uuid4()), 1)
    assert len(list(tmp_path.glob("textmill/runs/*/*.lock"))) == 2
    assert len(list(tmp_path.glob("textmill/runs/*"))) == 2


def ended(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize("end", [ended, subprocess.Popen.kill], ids=["ended", "killed"])
@pytest.mark.parametrize("limit", [1, 2])
def test_trainings_take_turns_across_processes(
    limit: int, end: Callable[[subprocess.Popen[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        first, *others = [stack.enter_context(other_process(TURN, limit)) for _ in range(limit)]
        assert [says(process) for process in (first, *others)] == ["in"] * limit
        waiting = stack.enter_context(other_process(TURN, limit))
        assert says(waiting).startswith("Waiting for another training on this machine to end")
        end(first)
        assert says(waiting) == "in"
        assert [process.poll() for process in others] == [None] * (limit - 1)


def test_a_limit_of_0_makes_no_training_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        processes = [stack.enter_context(other_process(TURN, 0)) for _ in range(3)]
        assert [says(process) for process in processes] == ["in"] * 3


@pytest.mark.parametrize("port", ["9", ""], ids=["gone", "none"])
def test_a_run_whose_server_is_gone_ends_without_it(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api" if port else None}):
        monkeypatch.setattr(runs, "_held", [])
        end_without_server(3)
        assert not codes, "no run was here"
        monkeypatch.setattr(runs, "_held", [object()])
        end_without_server(3)
    assert codes == ([3] if port else [])
    assert ("server does not answer" in capsys.readouterr().err) == bool(port)


@pytest.mark.parametrize(
    ("error", "tried"),
    [(httpx.ConnectError("refused"), ["ingest"]), (ValueError("this page alone"), ["ingest", "chunk", "count"])],
    ids=["gone", "refused"],
)
def test_only_a_server_that_is_gone_is_shown_no_later_page(
    error: Exception, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fails(markdown: str, key: str, description: str) -> None:
        asked.append(key)
        raise error

    monkeypatch.setattr(report, "create_markdown_artifact", fails)
    monkeypatch.setattr(report, "_is_gone", threading.Event())
    for key in ("ingest", "chunk", "count"):
        report._show(key, "", "")
    assert asked == tried
