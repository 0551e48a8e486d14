"""SIGKILL of the flow, the worker and the server: the next run succeeds, and no run stays in the state Running.

The server of these tests runs no automations, so a killed run does not start again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun

from lm.text.pretokenize import GPT2_PATTERN
from tests.helpers.deployed import STAGES, Services, slow_to_encode
from tests.helpers.limits import wait_for
from tests.helpers.postgres import find_postgres_program, postgres_database

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", params=["postgres", pytest.param("sqlite", marks=pytest.mark.long)])
def services(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A Prefect server with a worker. Without PostgreSQL, its tests run over SQLite."""
    home = tmp_path_factory.mktemp("services")
    if request.param == "sqlite" or not find_postgres_program("initdb"):
        services = Services(home)
        yield services
        services.close()
        return
    with postgres_database() as url:
        services = Services(home, PREFECT_API_DATABASE_CONNECTION_URL=url)
        yield services
        services.close()


@pytest.mark.parametrize(
    ("killed", "runs", "final_states"),
    [
        pytest.param({"flow"}, 1, ["Crashed: Process exited with status code: -9"], marks=pytest.mark.long),
        pytest.param({"worker"}, 1, ["Crashed: ", "Completed: "], marks=pytest.mark.long),  # the process may survive
        ({"server"}, 2, ["Completed: "]),
    ],
    ids=["flow", "worker", "server"],
)
def test_a_kill_during_encode(
    services: Services, tmp_path: Path, killed: set[str], runs: int, final_states: list[str]
) -> None:
    config = slow_to_encode(tmp_path / "slow.txt", chunks=6, chunk_bytes=40_000, threads=1)
    # The pattern looks for a "!" from every letter of a word: a second per chunk, and chunks small enough to train on.
    config |= {"tokenizer": {"vocab_size": 300, "pattern": rf"\p{{L}}*?\p{{L}}*!|{GPT2_PATTERN}"}}
    config |= {"train": config["train"] | {"batch_size": 32}}
    root, log = tmp_path / "root", services.home / "services.log"
    logged = log.stat().st_size
    killed_runs = [services.start("full", root=str(root), config=config) for _ in range(runs)]

    def are_encoding() -> bool:
        states = [state for run in killed_runs for name, state in services.states(run).items() if "encode-v" in name]
        are_running = all(services.flow_run(run).state_name == "Running" for run in killed_runs)
        return are_running and {"Completed", "Running"} <= set(states)

    wait_for(are_encoding, 180, "encode task")
    assert "ERROR" not in log.read_bytes()[logged:].decode()
    services.kill(killed, killed_runs[0])
    services.start_missing("server", "worker")
    wait_for(lambda: not any(map(services.processes, killed_runs)), 180, "end of the processes of the first runs")
    if killed == {"flow"}:
        wait_for(
            lambda: services.flow_run(killed_runs[0]).state_name == "Crashed", 120, "state Crashed from the worker"
        )

    last = services.start("full", root=str(root), config=config)
    wait_for(lambda: services.is_final(last), 300, "end of the last run")
    assert services.flow_run(last).state_name == "Completed"
    assert list(json.loads((root / "runs" / "latest.json").read_text())["stages"]) == list(STAGES)
    assert "encode-valid 1/5" not in services.states(last), "it is cached"
    for run in killed_runs:
        state = services.flow_run(run).state
        assert state is not None
        assert any(f"{state.name}: {state.message or ''}".startswith(expected) for expected in final_states), state
    wait_for(lambda: not unfinished(services), 120, "final states of all runs")
    uses_postgres = "PREFECT_API_DATABASE_CONNECTION_URL" in services.environment
    assert uses_postgres != bool(list(services.home.rglob("prefect.db")))


def unfinished(services: Services) -> list[str]:
    """Return the names of the flow runs without a final state, and of the task runs of those that did not crash."""
    final = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}
    runs = services.client.read_flow_runs()
    crashed = {run.id for run in runs if run.state_type == StateType.CRASHED}
    task_runs = [run for run in services.client.read_task_runs(limit=200) if run.flow_run_id not in crashed]
    every: list[FlowRun | TaskRun] = [*runs, *task_runs]
    return [run.name for run in every if run.state_type not in final]
