"""Waiting for a run of a deployment."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
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
