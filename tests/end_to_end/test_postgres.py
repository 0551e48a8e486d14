"""Several runs at once over SQLite and over PostgreSQL. ``test_killed_runs`` has a shorter one over PostgreSQL."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from tests.helpers.deployed import STAGES, TINY, Deployed, deployed
from tests.helpers.limits import wait_for
from tests.helpers.postgres import find_postgres_program, postgres_database

pytestmark = [pytest.mark.server, pytest.mark.long]


@pytest.fixture(scope="module")
def over_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    if not find_postgres_program("initdb"):
        pytest.skip("PostgreSQL's initdb is not installed")
    home = tmp_path_factory.mktemp("postgres")
    with postgres_database() as url, deployed(home, PREFECT_API_DATABASE_CONNECTION_URL=url) as stack:
        yield stack
    assert not list(home.rglob("*.db"))  # no SQLite database


@pytest.fixture(params=["prefect_deployed", "over_postgres"], ids=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest) -> Deployed:
    stack: Deployed = request.getfixturevalue(request.param)
    return stack


@pytest.mark.parametrize("roots", [1, 3], ids=["shared-root", "separate-roots"])
def test_three_runs_at_once(either: Deployed, tmp_path: Path, roots: int) -> None:
    log = either.home / "up.log"
    deployment = either.client.read_deployment_by_name("pipeline/full")
    before = log.stat().st_size
    parameters = [{"root": str(tmp_path / str(number % roots)), "config": TINY} for number in range(3)]
    create = either.client.create_flow_run_from_deployment  # faster than the prefect command
    runs = [create(deployment.id, parameters=values).id for values in parameters]
    for run_id in runs:
        wait_for(partial(either.is_final, run_id), 300, "end of a run")
        check_finished(either, run_id)
    starts, ends = zip(*((run.start_time, run.end_time) for run in map(either.flow_run, runs)), strict=True)
    assert max(starts) < min(ends)  # they ran at the same time
    output = log.read_bytes()[before:].decode()
    # The server reads and then writes a worker's heartbeat in one deferred transaction, for which SQLite may give
    # "database is locked". The worker connects again, and no run is affected.
    known_error = "Worker channel heartbeat persistence failed"
    assert not [line for line in output.splitlines() if "ERROR" in line and known_error not in line]


def check_finished(deployed: Deployed, run_id: UUID) -> None:
    """Check that a run and its tasks have succeeded and have logged no error."""
    run = deployed.flow_run(run_id)
    assert run.state_name == "Completed", run.state
    expected = {"find sources", *STAGES}  # another run may have made the groups

    def is_recorded() -> bool:  # task states are sent as events, which may arrive after the run's state
        states = deployed.states(run_id)
        return expected <= states.keys() and set(states.values()) <= {"Completed", "Cached"}

    wait_for(is_recorded, 120, "final states of the task runs")
    assert [line.message for line in deployed.logs(run_id) if line.level >= 40] == []
