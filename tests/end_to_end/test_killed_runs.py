"""SIGKILL of the flow, the worker and the server: the next run succeeds, and no run stays in the state Running."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun

from lm.text.pretokenize import GPT2_PATTERN
from tests.helpers.deployed import STAGES, Services, slow_to_encode
from tests.helpers.limits import wait_for

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("services"))
    yield services
    services.close()


@pytest.mark.parametrize(
    ("killed", "final_states"),
    [
        pytest.param({"flow"}, ["Crashed: Process exited with status code: -9"], marks=pytest.mark.long),
        pytest.param({"flow", "worker"}, ["Crashed: Its process died; detected by run "], marks=pytest.mark.long),
        pytest.param({"worker"}, ["Crashed: ", "Completed: "], marks=pytest.mark.long),  # the process may survive
        ({"server"}, ["Completed: "]),
    ],
    ids=["flow", "flow-and-worker", "worker", "server"],
)
def test_a_kill_during_encode(services: Services, tmp_path: Path, killed: set[str], final_states: list[str]) -> None:
    config = slow_to_encode(tmp_path / "slow.txt", chunks=6, chunk_bytes=40_000, threads=1)
    # The pattern looks for a "!" from every letter of a word: a second per chunk, and chunks small enough to train on.
    config |= {"tokenizer": {"vocab_size": 300, "pattern": rf"\p{{L}}*?\p{{L}}*!|{GPT2_PATTERN}"}}
    config |= {"train": config["train"] | {"batch_size": 32}}
    root = tmp_path / "root"
    first = services.start("full", root=str(root), config=config)

    def is_encoding() -> bool:
        states = [state for name, state in services.states(first).items() if name.startswith("encode-valid ")]
        return {"Completed", "Running"} <= set(states)

    wait_for(is_encoding, 180, "encode task")
    services.kill(killed, first)
    services.start_missing("server", "worker")
    wait_for(lambda: not services.processes(first), 180, "end of the first run's process")
    if killed == {"flow"}:
        wait_for(lambda: services.flow_run(first).state_name == "Crashed", 120, "state Crashed from the worker")
    elif killed == {"flow", "worker"}:
        assert services.flow_run(first).state_name == "Running"  # no process is left that could report the crash

    done = services.run("full", root=str(root), config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    second = services.latest()
    assert second.state_name == "Completed"
    assert list(json.loads((root / "runs" / "latest.json").read_text())["stages"]) == list(STAGES)
    assert "encode-valid 1/5" not in services.states(second.id), "it is cached"
    state = services.flow_run(first).state
    assert state is not None
    assert any(f"{state.name}: {state.message or ''}".startswith(expected) for expected in final_states), state
    wait_for(lambda: not unfinished(services), 120, "final states of all runs")


def unfinished(services: Services) -> list[str]:
    """Return the names of the flow runs and task runs without a final state."""
    final = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}
    runs: list[FlowRun | TaskRun] = [*services.client.read_flow_runs(), *services.client.read_task_runs(limit=200)]
    return [run.name for run in runs if run.state_type not in final]
