"""SIGKILL of the flow, the worker and the server: the next run succeeds, and nothing is shown as running for ever."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType

from lm.pretokens import GPT2_PATTERN
from tests.deployed import STAGES, Services, slow_to_encode, wait_for


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    found = Services(tmp_path_factory.mktemp("services"))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("killed", "state", "message"),
    [
        ({"flow"}, "Crashed", "Flow run process exited with non-zero status code -9"),
        ({"flow", "worker"}, "Crashed", "Its process died; found by run "),
        ({"worker"}, "Completed", ""),
        ({"server"}, "Completed", ""),
    ],
    ids=["flow", "flow-and-worker", "worker", "server"],
)
def test_what_is_killed_while_a_run_encodes(
    services: Services, tmp_path: Path, killed: set[str], state: str, message: str
) -> None:
    config = slow_to_encode(tmp_path / "slow.txt", chunks=8, chunk_bytes=40_000, threads=2)
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
    services.start_missing()
    if killed == {"flow"}:
        wait_for(lambda: services.flow_run(first).state_name == "Crashed", 60, "the worker's word of the crash")
    elif killed == {"flow", "worker"}:
        assert services.flow_run(first).state_name == "Running"  # nobody is left to say otherwise

    done = services.run("full", root=str(root), config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    second = services.latest()
    assert second.state_name == "Completed"
    assert list(json.loads((root / "runs" / "latest.json").read_text())["stages"]) == list(STAGES)
    if "flow" in killed:
        assert "Cached" in {found for name, found in services.states(second.id).items() if "valid chunk" in name}

    wait_for(lambda: not services.processes(first), 60, "the end of the first run")
    found = services.flow_run(first).state
    print(found, services.states(first))
    assert found is not None
    assert (found.name, (found.message or "")[: len(message)]) == (state, message)
    assert unfinished(services) == {}


def unfinished(services: Services) -> dict[str, str]:
    """All flow runs and task runs that are not at an end, with their states."""
    ends = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}
    runs = [*services.client.read_flow_runs(), *services.client.read_task_runs(limit=200)]
    return {run.name: str(run.state_name) for run in runs if run.state_type not in ends}
