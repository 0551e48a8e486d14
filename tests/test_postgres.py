"""Several runs at once over SQLite and over PostgreSQL."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.deployed import STAGES, TINY, Deployed, deployed, free_port, wait_for


def tool(name: str) -> str:
    """A program of PostgreSQL: of the path, or of the newest version where Debian installs it."""
    standard = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[4]))
    found = shutil.which(name) or (str(standard[-1]) if standard else None)
    if found is None:
        pytest.skip(f"PostgreSQL's {name} is not installed")
    return found


def owner() -> str | None:
    """Who runs PostgreSQL, which refuses root: another user for root, else whoever runs the tests."""
    users = {found.pw_name for found in pwd.getpwall()}
    return None if os.geteuid() else "postgres" if "postgres" in users else "nobody"


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of an empty database of the tests' own."""
    initdb, pg_ctl, user, port = tool("initdb"), tool("pg_ctl"), owner(), free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # pytest's are closed to other users
        home = Path(name)
        options: dict[str, Any] = {"cwd": home, "check": True, "capture_output": True}
        if user:
            shutil.chown(home, user)
            options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        command = [initdb, "--pgdata", home / "data", "--username=textmill", "--auth=trust", "--no-sync"]
        subprocess.run(command, **options)
        control = [pg_ctl, "--pgdata", home / "data", "--wait", "--log", home / "log"]
        server = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={home} -c fsync=off"
        subprocess.run([*control, "--options", server, "start"], **options | {"capture_output": False})
        try:
            yield f"postgresql+asyncpg://textmill@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "--mode=fast", "stop"], **options)


@pytest.fixture(scope="module")
def over_postgres(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    home = tmp_path_factory.mktemp("postgres")
    with deployed(home, PREFECT_API_DATABASE_CONNECTION_URL=postgres) as found:
        yield found
    assert not list(home.rglob("*.db"))  # nothing went to SQLite


@pytest.fixture(params=["prefect_deployed", "over_postgres"], ids=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest) -> Deployed:
    found: Deployed = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("roots", [1, 3], ids=["one-root", "roots-of-their-own"])
def test_three_runs_at_once(either: Deployed, tmp_path: Path, roots: int) -> None:
    log = either.home / "up.log"
    deployment = either.client.read_deployment_by_name("pipeline/full")
    before = log.stat().st_size
    parameters = [{"root": str(tmp_path / str(number % roots)), "config": TINY} for number in range(3)]
    create = either.client.create_flow_run_from_deployment  # three commands would take as long as a run
    runs = [create(deployment.id, parameters=given).id for given in parameters]
    for run_id in runs:
        wait_for(lambda run_id=run_id: is_final(either, run_id), 240, "the end of a run")
        check_finished(either, run_id)
    starts, ends = zip(*((run.start_time, run.end_time) for run in map(either.flow_run, runs)), strict=True)
    assert max(starts) < min(ends)  # they did run at once
    said = log.read_bytes()[before:].decode()
    # The server reads and then writes a worker's heartbeat in one deferred transaction, for which SQLite may give
    # "database is locked"; the worker connects again, and no run is touched.
    known = "Worker channel heartbeat persistence failed"
    assert not [line for line in said.splitlines() if "ERROR" in line and known not in line]


def is_final(deployed: Deployed, run_id: UUID) -> bool:
    state = deployed.flow_run(run_id).state
    return state is not None and state.is_final()


def check_finished(deployed: Deployed, run_id: UUID) -> None:
    """A run and its tasks are recorded, have succeeded and have logged no error."""
    run = deployed.flow_run(run_id)
    assert run.state_name == "Completed", run.state
    wanted = {"find sources", *STAGES} | {f"encode chunk {number}/5" for number in range(1, 6)}

    def states() -> dict[str, str]:  # those of tasks are sent as events, which may come after the run's
        return deployed.states(run_id)

    wait_for(lambda: wanted <= states().keys() and set(states().values()) <= {"Completed", "Cached"}, 30, "task runs")
    assert [line.message for line in deployed.logs(run_id) if line.level >= 40] == []
