"""The last states of runs: those that the next start of a run sets, and the end of a process without a server."""

import os
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running

from flows.prefect_support import final_states
from flows.prefect_support.final_states import exit_if_server_is_gone, note_start


@flow
def empty_flow() -> None:
    pass


@task
def empty_task() -> None:
    pass


@pytest.mark.usefixtures("prefect_server")
def test_a_new_start_of_a_run_ends_the_task_runs_of_the_killed_one() -> None:
    task_states: list[State[Any]] = [Running(), Completed()]
    with get_client(sync_client=True) as client:
        run_id = client.create_flow_run(empty_flow).id
        for number, state in enumerate(task_states):
            client.create_task_run(empty_task, run_id, str(number), name=state.name, state=state)

    def states(run_id: UUID) -> dict[str, str | None]:
        with get_client(sync_client=True) as client:
            in_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
            return {run.name: run.state_name for run in client.read_task_runs(flow_run_filter=in_run)}

    note_start(str(run_id), 1)
    assert states(run_id) == {"Running": "Running", "Completed": "Completed"}
    note_start(str(run_id), 2)
    assert states(run_id) == {"Running": "Crashed", "Completed": "Completed"}


@pytest.mark.parametrize("port", ["9", ""], ids=["server-gone", "no-server"])
def test_a_process_exits_at_once_if_its_server_is_gone(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api" if port else None}):
        monkeypatch.setattr(final_states, "_runs", [])
        exit_if_server_is_gone(3)
        assert not codes, "no flow ran in this process"
        monkeypatch.setattr(final_states, "_runs", ["a run"])
        exit_if_server_is_gone(3)
    assert codes == ([3] if port else [])
    assert ("server does not respond" in capsys.readouterr().err) == bool(port)
