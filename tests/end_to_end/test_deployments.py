"""The deployments, with a server, a worker and ``prefect deployment run``."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Running

from flows.prefect_support.recovery import recovery_automations
from tests.helpers.deployed import STAGES, TINY, Deployed
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT
from tests.helpers.webhook import recorded_posts


@pytest.fixture
def root(deployed_run: FlowRun) -> str:
    """The root of a finished run of all stages."""
    return str(deployed_run.parameters["root"])


def finish(deployed: Deployed, deployment: str, **parameters: Any) -> FlowRun:
    """Run a deployment, and return the completed run. Faster than the command of Prefect."""
    run_id = deployed.start(deployment, **parameters)
    wait_for(lambda: deployed.is_final(run_id), 300, "end of the run")
    run = deployed.flow_run(run_id)
    assert run.state_name == "Completed", run.state
    return run


def test_prefect_records_every_stage_and_group_of_a_run(
    prefect_deployed: Deployed, deployed_run: FlowRun, root: str
) -> None:
    run = deployed_run
    states = prefect_deployed.states(run.id)
    groups = [f"{part} {number}/5" for part in ("count", "encode-train") for number in range(1, 6)]
    groups += ["ingest-train 1/1", "chunk-train 1/1", "chunk-valid 1/1", "encode-valid 1/1"]
    assert states == dict.fromkeys(["find sources", *STAGES, *groups], "Completed")
    assert run.state_name == "Completed"
    assert set(run.tags) == {"textmill", "demo", "full"}
    assert (Path(root) / "runs" / f"{run.name}.json").exists()


@pytest.mark.parametrize(
    "stage",
    [stage if stage == "train" else pytest.param(stage, marks=pytest.mark.long) for stage in STAGES],
)
def test_the_deployment_of_a_stage_takes_earlier_stages_from_the_cache(
    prefect_deployed: Deployed, root: str, stage: str
) -> None:
    states = prefect_deployed.states(finish(prefect_deployed, stage, root=root, config=TINY).id)
    before, after = STAGES[: STAGES.index(stage)], STAGES[STAGES.index(stage) + 1 :]
    assert states[stage] == "Completed"
    assert {states[name] for name in before} <= {"Cached"}
    assert not set(after) & states.keys()


def test_an_invalid_parameter_creates_no_run(prefect_deployed: Deployed) -> None:
    before = len(prefect_deployed.client.read_flow_runs())
    done = prefect_deployed.run("full", config={"train": {"steps": "many"}})
    assert done.returncode == 1
    assert "config.train.steps" in done.stdout + done.stderr
    assert "integer" in done.stdout + done.stderr
    mistakes: list[tuple[dict[str, dict[str, object]], str, str]] = [
        ({"train": {"steps": 0}}, "config.train.steps", "minimum"),
        ({"train": {"stepz": 5}}, "config.train", "stepz"),  # misspelled
        ({"model": {"d_model": 64.5}}, "config.model.d_model", "integer"),
    ]
    for config, field, reason in mistakes:
        with pytest.raises(PrefectHTTPStatusError, match=rf"(?s){re.escape(field)}.*{reason}"):
            prefect_deployed.start("full", config=config)
    assert len(prefect_deployed.client.read_flow_runs()) == before


def test_a_failing_run_exits_with_1_one_line_of_explanation_and_an_alert(
    prefect_deployed: Deployed, tmp_path: Path
) -> None:
    guide, url = (PROJECT / "docs" / "prefect.md").read_text(encoding="utf-8"), "https://hooks.example.com/services/KEY"
    (alert,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if url in block)
    missing = str(tmp_path / 'missing "x".txt')
    with recorded_posts() as (address, posts):
        script = [sys.executable, "-c", alert.replace(url, address)]
        subprocess.run(script, env=prefect_deployed.environment, check=True)
        done = prefect_deployed.run("full", root=str(tmp_path), config={"data": {"train": [missing]}})
        wait_for(lambda: posts, 60, "alert")
    assert done.returncode == 1
    run = prefect_deployed.latest()
    assert run.state is not None
    assert run.state.message == f"Flow run encountered an exception: UserError: {missing} does not exist."
    assert [json.loads(post) for post in posts] == [{"text": f"{run.name}: {run.state.message}"}]
    wait_for(lambda: any(missing in line.message for line in prefect_deployed.logs(run.id)), 60, "log line")
    assert not any("Traceback" in line.message for line in prefect_deployed.logs(run.id))


def test_a_run_whose_heartbeats_stop_starts_again(prefect_deployed: Deployed, root: str) -> None:
    """With an automation that waits ten seconds and not ten minutes, and a run that no process works for."""
    client = prefect_deployed.client
    automation = recovery_automations(timedelta(seconds=10))[0]
    automation_id = client.create_automation(automation.model_copy(update={"name": "heartbeats of a test"}))
    deployment = client.read_deployment_by_name("pipeline/full")
    parameters = {"root": root, "config": TINY}
    run_id = client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Running()).id
    heartbeat = {
        "occurred": datetime.now(UTC).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run_id}"},
        "related": [{"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.textmill"}],
        "id": str(uuid4()),
    }
    client.request("POST", "/events", json=[heartbeat])
    try:
        wait_for(lambda: prefect_deployed.flow_run(run_id).state_name == "Completed", 180, "end of the run")
    finally:
        client.delete_automation(automation_id)  # it would end the runs of other tests
    states = [state.name for state in client.read_flow_run_states(run_id)]
    assert states[:3] == ["Running", "Crashed", "Scheduled"]


def test_missing_config_fields_are_those_of_the_deployment(prefect_deployed: Deployed, tmp_path: Path) -> None:
    config = {"data": {"train": ["demo:60"], "valid": []}, "chunk": {"target_bytes": 9_999}}
    finish(prefect_deployed, "stories-cpu", root=str(tmp_path), config=config, until="chunk")
    recorded = json.loads((tmp_path / "runs" / "latest.json").read_text())["config"]
    assert recorded["data"]["train"] == ["demo:60"]
    assert recorded["chunk"]["target_bytes"] == 9_999
    assert recorded["train"]["steps"] == 5200


def test_a_machine_of_another_work_pool_trains_and_its_log_explains_why(
    prefect_deployed: Deployed, root: str, tmp_path: Path
) -> None:
    command = ["deploy", "--name", "gpu-train", "--pool", "gpu", "--until", "train"]
    assert prefect_deployed.textmill(*command, directory=tmp_path).returncode == 0
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", "gpu"]
    environment = {**prefect_deployed.environment, "PREFECT_WORKER_QUERY_SECONDS": "2"}
    config = TINY | {"train": TINY["train"] | {"seed": 1}, "execution": {"train_deployment": "pipeline/gpu-train"}}
    with subprocess.Popen(command, cwd=PROJECT, env=environment, stderr=subprocess.DEVNULL) as worker:
        try:
            run = finish(prefect_deployed, "full", root=root, config=config)
        finally:
            worker.kill()  # a worker does not always stop after SIGTERM
    assert run.work_pool_name == "local"
    states = prefect_deployed.states(run.id)
    assert states["train"] == states["pipeline/gpu-train"] == "Completed"
    record = json.loads((Path(root) / "runs" / f"{run.name}.json").read_text())
    assert record["stages"]["train"]["state"] == "made"
    (gpu_run,) = [run for run in prefect_deployed.client.read_flow_runs() if run.work_pool_name == "gpu"]
    assert gpu_run.state_name == "Completed"
    states = prefect_deployed.states(gpu_run.id)
    assert states["train"] == "Completed"
    assert states["encode"] == "Cached"
    tasks: dict[UUID | None, str] = {task.id: task.name for task in prefect_deployed.task_runs(gpu_run.id)}

    def lines() -> list[tuple[str | None, str]]:
        return [(tasks.get(line.task_run_id), line.message) for line in prefect_deployed.logs(gpu_run.id)]

    reason = ("train", "Running train: seed 0 → 1.")
    wait_for(lambda: reason in lines(), 60, "log of train")  # logs are sent in batches
    assert ("count", "count: cached.") in lines()
