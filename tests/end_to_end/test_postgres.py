"""Several runs at once over SQLite and over PostgreSQL."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.helpers.deployed import STAGES, TINY, Deployed, deployed, free_port
from tests.helpers.limits import wait_for

pytestmark = pytest.mark.server


def postgres_program(name: str) -> str:
    """Return the path of a PostgreSQL program: from PATH or Debian's newest version. Skip without one."""
    standard = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[4]))
    path = shutil.which(name) or (str(standard[-1]) if standard else None)
    if path is None:
        pytest.skip(f"PostgreSQL's {name} is not installed")
    return path


def postgres_user() -> str | None:
    """Return the user to run PostgreSQL as, which refuses root. None: the current user."""
    users = {user.pw_name for user in pwd.getpwall()}
    return None if os.geteuid() else "postgres" if "postgres" in users else "nobody"


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of an empty database."""
    initdb, pg_ctl = postgres_program("initdb"), postgres_program("pg_ctl")
    user, port = postgres_user(), free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # other users cannot read pytest's
        home = Path(name)
        options: dict[str, Any] = {"cwd": home, "check": True, "capture_output": True}
        if user:
            shutil.chown(home, user)
            options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        command = [initdb, "--pgdata", str(home / "data"), "--username=textmill", "--auth=trust", "--no-sync"]
        subprocess.run(command, **options)
        control = [pg_ctl, "--pgdata", str(home / "data"), "--wait", "--log", str(home / "log")]
        server = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={home} -c fsync=off"
        subprocess.run([*control, "--options", server, "start"], **options | {"capture_output": False})
        try:
            yield f"postgresql+asyncpg://textmill@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "--mode=fast", "stop"], **options)


@pytest.fixture(scope="module")
def over_postgres(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    home = tmp_path_factory.mktemp("postgres")
    with deployed(home, PREFECT_API_DATABASE_CONNECTION_URL=postgres) as stack:
        yield stack
    assert not list(home.rglob("*.db"))  # no SQLite database


_SQLITE = pytest.param("prefect_deployed", marks=pytest.mark.long)


@pytest.fixture(params=[_SQLITE, "over_postgres"], ids=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest) -> Deployed:
    stack: Deployed = request.getfixturevalue(request.param)
    return stack


@pytest.mark.parametrize("roots", [1, pytest.param(3, marks=pytest.mark.long)], ids=["shared-root", "separate-roots"])
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
