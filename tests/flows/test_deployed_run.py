"""Waiting for a run of a deployment."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed, Running
from tenacity import stop_after_attempt, wait_none

from flows.pipeline import pipeline
from flows.prefect_support import deployed_run
from lm.common.errors import UserError
from tests.helpers.deployed import TINY


class FailingClient:
    """Fails ``failures`` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def read_flow_run(self, run_id: str) -> Any:
        self.failures -= 1
        if self.failures >= 0:
            raise httpx.HTTPStatusError("500", request=httpx.Request("GET", "http://s"), response=httpx.Response(500))
        return SimpleNamespace(state="running")


def test_a_failure_of_the_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed_run._read_state.retry, "wait", wait_none())
    assert deployed_run._read_state(FailingClient(3), "x") == "running"
    monkeypatch.setattr(deployed_run._read_state.retry, "stop", stop_after_attempt(2))
    with pytest.raises(httpx.HTTPStatusError):
        deployed_run._read_state(FailingClient(3), "x")


@pytest.mark.usefixtures("prefect_server")
def test_a_missing_deployment_is_named_before_the_first_stage(tmp_path: Path) -> None:
    config: Any = TINY | {"execution": {"train_deployment": "pipeline/none"}}  # Prefect makes a PipelineConfig of it
    with pytest.raises(UserError, match=r"no deployment pipeline/none, which execution\.train_deployment names"):
        pipeline(config, str(tmp_path))
    assert not list(tmp_path.glob("*/*/manifest.json"))


@flow
def parent() -> None:
    """Wait for a run of a deployment."""
    deployed_run.run_deployment_to_end("child/gpu", {})


@contextmanager
def worker(state: State[Any]) -> Iterator[None]:
    """Give the first run of the deployment ``child/gpu`` a state, as a worker does."""

    def work() -> None:
        with get_client(sync_client=True) as client:
            while not stop.wait(0.2):
                for run in client.read_flow_runs():
                    if run.deployment_id == deployment and run.state and not run.state.is_final():
                        client.set_flow_run_state(run.id, Running(), force=True)
                        client.set_flow_run_state(run.id, state, force=True)

    stop = threading.Event()
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow_from_name("child"), "gpu")
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("state", [Completed(), Failed(message="no memory")], ids=["completed", "failed"])
def test_a_run_of_a_deployment_has_its_name_in_the_graph(monkeypatch: pytest.MonkeyPatch, state: State[Any]) -> None:
    monkeypatch.setattr(deployed_run, "_POLL_SECONDS", 0.1)
    with worker(state):
        if state.is_completed():
            parent()
        else:
            with pytest.raises(UserError, match="child/gpu ended in the state Failed: no memory"):
                parent()
    with get_client(sync_client=True) as client:
        latest = max(client.read_task_runs(), key=attrgetter("created"))
    assert (latest.name, latest.state_name) == ("child/gpu", state.name)
