"""SIGKILL of the flow, the worker and the server: the next run succeeds, and nothing is shown as running for ever."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun

from lm.pretokens import GPT2_PATTERN
from tests.deployed import STAGES, Services, slow_to_encode, wait_for


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    found = Services(tmp_path_factory.mktemp("services"))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("killed", "ends"),
    [
        ({"flow"}, ["Crashed: Process exited with status code: -9"]),
        ({"flow", "worker"}, ["Crashed: Its process died; found by run "]),
        ({"worker"}, ["Crashed: ", "Completed: "]),  # the process lives until it has something to tell its worker
        ({"server"}, ["Completed: "]),
    ],
    ids=["flow", "flow-and-worker", "worker", "server"],
)
def test_a_kill_while_a_run_encodes(services: Services, tmp_path: Path, killed: set[str], ends: list[str]) -> None:
    config = slow_to_encode(tmp_path / "slow.txt", chunks=6, chunk_bytes=40_000, threads=1)
    # Looks for a "!" from every letter of a word on: a second a chunk, which is so small that training is quick.
    config |= {"tokenizer": {"vocab_size": 300, "pattern": rf"\p{{L}}*?\p{{L}}*!|{GPT2_PATTERN}"}}
    config |= {"train": config["train"] | {"batch_size": 32}}
    root = tmp_path / "root"
    first = services.start("full", root=str(root), config=config)

    def is_encoding() -> bool:
        states = [found for name, found in services.states(first).items() if name.startswith("encode valid chunk")]
        return {"Completed", "Running"} <= set(states)

    wait_for(is_encoding, 90, "encode")
    services.kill(killed, first)
    services.start_missing("server", "worker")
    wait_for(lambda: not services.processes(first), 90, "the end of the first run's process")
    if killed == {"flow"}:
        wait_for(lambda: services.flow_run(first).state_name == "Crashed", 60, "the worker's word of the crash")
    elif killed == {"flow", "worker"}:
        assert services.flow_run(first).state_name == "Running"  # nobody is left to say otherwise

    done = services.run("full", root=str(root), config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    second = services.latest()
    assert second.state_name == "Completed"
    assert list(json.loads((root / "runs" / "latest.json").read_text())["stages"]) == list(STAGES)
    assert services.states(second.id)["encode valid chunk 1/5"] == "Cached"
    state = services.flow_run(first).state
    assert state is not None
    assert any(f"{state.name}: {state.message or ''}".startswith(end) for end in ends), state
    wait_for(lambda: not unfinished(services), 30, "the states of tasks, which are sent as events,")


def unfinished(services: Services) -> list[str]:
    """All flow runs and task runs that are not at an end."""
    ends = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}
    runs: list[FlowRun | TaskRun] = [*services.client.read_flow_runs(), *services.client.read_task_runs(limit=200)]
    return [run.name for run in runs if run.state_type not in ends]
