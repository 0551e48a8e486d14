"""The deployments, with a server, a worker and ``prefect deployment run``."""

import json
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from tests.helpers.deployed import STAGES, TINY, Deployed
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT


@pytest.fixture(scope="module")
def root(prefect_deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The root of a finished run of all stages."""
    root = tmp_path_factory.mktemp("deployed") / "root"
    done = prefect_deployed.run("full", root=str(root), config=TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(root)


def test_prefect_records_every_stage_and_group_of_a_run(prefect_deployed: Deployed, root: str) -> None:
    run = next(run for run in prefect_deployed.client.read_flow_runs() if run.parameters["root"] == root)
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
    done = prefect_deployed.run(stage, root=root, config=TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    states = prefect_deployed.states(prefect_deployed.latest().id)
    before, after = STAGES[: STAGES.index(stage)], STAGES[STAGES.index(stage) + 1 :]
    assert states[stage] == "Completed"
    assert {states[name] for name in before} <= {"Cached"}
    assert not set(after) & states.keys()


@pytest.mark.parametrize(
    ("config", "field", "reason"),
    [
        ({"train": {"steps": "many"}}, "config.train.steps", "integer"),
        ({"train": {"steps": 0}}, "config.train.steps", "minimum"),
        ({"train": {"stepz": 5}}, "config.train", "stepz"),  # misspelled
        ({"model": {"d_model": 64.5}}, "config.model.d_model", "integer"),
    ],
)
def test_an_invalid_parameter_creates_no_run(
    prefect_deployed: Deployed, config: dict[str, dict[str, object]], field: str, reason: str
) -> None:
    before = len(prefect_deployed.client.read_flow_runs())
    done = prefect_deployed.run("full", config=config)
    assert done.returncode == 1
    assert field in done.stdout + done.stderr
    assert reason in done.stdout + done.stderr
    assert len(prefect_deployed.client.read_flow_runs()) == before


def test_a_failing_run_exits_with_1_and_one_line_of_explanation(prefect_deployed: Deployed, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.txt")
    done = prefect_deployed.run("full", root=str(tmp_path), config={"data": {"train": [missing]}})
    assert done.returncode == 1
    run = prefect_deployed.latest()
    assert run.state is not None
    assert run.state.message == f"Flow run encountered an exception: UserError: {missing} does not exist."
    wait_for(lambda: any(missing in line.message for line in prefect_deployed.logs(run.id)), 60, "log line")
    assert not any("Traceback" in line.message for line in prefect_deployed.logs(run.id))


def test_the_log_of_a_task_explains_why_it_ran_or_was_cached(prefect_deployed: Deployed, root: str) -> None:
    config = TINY | {"tokenizer": {"vocab_size": 290}}
    done = prefect_deployed.run("full", root=root, config=config, until="merge")
    assert done.returncode == 0, done.stdout + done.stderr
    run = prefect_deployed.latest()
    tasks: dict[UUID | None, str] = {task.id: task.name for task in prefect_deployed.task_runs(run.id)}

    def lines() -> list[tuple[str | None, str]]:
        return [(tasks.get(line.task_run_id), line.message) for line in prefect_deployed.logs(run.id)]

    reason = ("merge", "Running merge: vocab_size 300 → 290.")
    wait_for(lambda: reason in lines(), 60, "log of merge")  # logs are sent in batches
    assert any(name == "count" and message.startswith("count: cached, made by ") for name, message in lines())
    assert (None, "count: cached, 5 groups.") in lines()


def test_missing_config_fields_are_those_of_the_deployment(prefect_deployed: Deployed, tmp_path: Path) -> None:
    config = {"data": {"train": ["demo:60"], "valid": []}, "chunk": {"target_bytes": 9_999}}
    done = prefect_deployed.run("stories-cpu", root=str(tmp_path), config=config, until="chunk")
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = json.loads((tmp_path / "runs" / "latest.json").read_text())["config"]
    assert recorded["data"]["train"] == ["demo:60"]
    assert recorded["chunk"]["target_bytes"] == 9_999
    assert recorded["train"]["steps"] == 5200


def test_a_machine_of_another_work_pool_trains(prefect_deployed: Deployed, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", "gpu"]
    environment = {**prefect_deployed.environment, "PREFECT_WORKER_QUERY_SECONDS": "2"}
    with subprocess.Popen(command, cwd=PROJECT, env=environment, stderr=subprocess.DEVNULL) as worker:
        try:
            done = prefect_deployed.run("two-pools", root=str(tmp_path), config=TINY)
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            worker.terminate()
    runs = [run for run in prefect_deployed.client.read_flow_runs() if run.parameters["root"] == str(tmp_path)]
    by_pool = {run.work_pool_name: run for run in runs}
    assert by_pool.keys() == {"local", "gpu"}
    assert all(run.state_name == "Completed" for run in runs)
    states = prefect_deployed.states(by_pool["local"].id)
    assert states["train"] == states["pipeline/gpu-train"] == "Completed"
    record = json.loads((tmp_path / "runs" / f"{by_pool['local'].name}.json").read_text())
    assert record["stages"]["train"]["state"] == "made"
    states = prefect_deployed.states(by_pool["gpu"].id)
    assert states["train"] == "Completed"
    assert states["encode"] == "Cached"
