"""The deployments as people use them: a server, a worker, ``prefect deployment run``."""

import json
from pathlib import Path

import pytest

from tests.deployed import TINY, Deployed, wait_for

STAGES = ["ingest", "chunk", "count", "merge", "encode", "train", "sample"]


@pytest.fixture(scope="module")
def root(prefect_deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root in which the whole chain has run."""
    root = tmp_path_factory.mktemp("deployed") / "root"
    done = prefect_deployed.run("full", root=str(root), config=TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(root)


def test_every_stage_and_chunk_of_a_run_is_recorded_with_its_final_state(prefect_deployed: Deployed, root: str) -> None:
    run = next(found for found in prefect_deployed.client.read_flow_runs() if found.parameters["root"] == root)
    states = prefect_deployed.states(run.id)
    chunks = [f"{verb} chunk {number}/5" for verb in ("count", "encode") for number in range(1, 6)]
    assert states == dict.fromkeys(["find sources", *STAGES, *chunks, "encode valid chunk 1/1"], "Completed")
    assert run.state_name == "Completed"
    assert set(run.tags) == {"textmill", "full"}
    assert (Path(root) / "runs" / f"{run.name}.json").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_the_deployment_of_a_stage_takes_what_comes_before_from_the_cache(
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
    ("config", "field", "what"),
    [
        ({"train": {"steps": "many"}}, "config.train.steps", "integer"),
        ({"train": {"steps": 0}}, "config.train.steps", "minimum"),
        ({"train": {"stepz": 5}}, "config.train", "stepz"),  # misspelled
        ({"model": {"d_model": 64.5}}, "config.model.d_model", "integer"),
    ],
)
def test_a_mistake_is_refused_before_there_is_a_run(
    prefect_deployed: Deployed, config: dict[str, dict[str, object]], field: str, what: str
) -> None:
    before = len(prefect_deployed.client.read_flow_runs())
    done = prefect_deployed.run("full", config=config)
    assert done.returncode == 1
    assert field in done.stdout + done.stderr
    assert what in done.stdout + done.stderr
    assert len(prefect_deployed.client.read_flow_runs()) == before


def test_a_failing_run_exits_with_1_and_says_why_in_one_line(prefect_deployed: Deployed, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.txt")
    done = prefect_deployed.run("full", root=str(tmp_path), config={"data": {"train": [missing]}})
    assert done.returncode == 1
    run = prefect_deployed.latest()
    assert run.state is not None
    assert run.state.message == f"Flow run encountered an exception: UserError: {missing} does not exist."
    wait_for(lambda: any(missing in line.message for line in prefect_deployed.logs(run.id)), 20, "the log")
    assert not any("Traceback" in line.message for line in prefect_deployed.logs(run.id))


def test_the_log_of_a_task_says_why_it_ran_or_was_cached(prefect_deployed: Deployed, root: str) -> None:
    config = TINY | {"tokenizer": {"vocab_size": 290}}
    done = prefect_deployed.run("full", root=root, config=config, until="merge")
    assert done.returncode == 0, done.stdout + done.stderr
    run = prefect_deployed.latest()
    tasks = {task.id: task.name for task in prefect_deployed.task_runs(run.id)}

    def lines() -> list[tuple[str | None, str]]:
        return [(tasks.get(line.task_run_id), line.message) for line in prefect_deployed.logs(run.id)]

    why = ("merge", "merge runs: changed since its last result: parameters.config.vocab_size.")
    wait_for(lambda: why in lines(), 20, "the log of merge")  # logs are sent in batches
    assert any(name == "count chunk 1/5" and "is cached: run " in message for name, message in lines())


def test_what_is_left_out_of_the_config_is_the_deployments(prefect_deployed: Deployed, tmp_path: Path) -> None:
    config = {"data": {"train": ["demo:60"], "valid": []}, "chunk": {"target_bytes": 9_999}}
    done = prefect_deployed.run("stories-cpu", root=str(tmp_path), config=config, until="chunk")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "runs" / "latest.json").read_text())["config"]
    assert found["data"]["train"] == ["demo:60"]
    assert found["chunk"]["target_bytes"] == 9_999
    assert found["train"]["steps"] == 5200
