"""Flows in the process of a command: mistakes in Prefect's settings, and the end of its temporary server."""

import os
import subprocess
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect import flow
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    get_current_settings,
    temporary_settings,
)

from flows.cli.local_run import run_flow
from lm.common.errors import UserError
from tests.helpers.deployed import TEXTMILL, own_environment
from tests.helpers.limits import wait_for
from tests.helpers.processes import processes_with_variable


@flow
def empty() -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("status", "message"),
    [(200, "does not answer like one.*ends with /api"), (404, "ends with /api"), (401, "PREFECT_API_KEY")],
)
def test_the_url_of_another_server_or_a_missing_key_is_one_message(status: int, message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with temporary_settings({PREFECT_API_URL: url}), pytest.raises(UserError, match=f"{url}.*{message}"):
                run_flow(empty)
        finally:
            server.shutdown()


def test_a_home_of_prefect_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    settings = temporary_settings({PREFECT_HOME: home}, restore_defaults={PREFECT_API_URL})
    with settings, pytest.raises(UserError, match=f"{home} cannot be written.*PREFECT_HOME"):
        run_flow(empty)


@pytest.mark.parametrize("frequency", [None, 30, 75])
def test_heartbeats_are_off_unless_the_user_sets_them(frequency: int | None) -> None:
    chosen = {} if frequency is None else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: frequency}
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api", **chosen}):
        found = run_flow(lambda: get_current_settings().flows.heartbeat_frequency)
    assert found == frequency


@pytest.mark.slow
def test_the_temporary_server_ends_with_a_killed_run_and_not_by_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C reaches the process group of a command. A server that it ends cannot learn how the run ended."""
    variable = ("TEMPORARY_SERVER_TEST", uuid.uuid4().hex)

    def servers() -> list[int]:
        commands = {process: Path(f"/proc/{process}/cmdline") for process in processes_with_variable(*variable)}
        return [process for process, path in commands.items() if path.exists() and b"uvicorn" in path.read_bytes()]

    run = subprocess.Popen(
        [*TEXTMILL, "run", "--root", str(tmp_path / "root")],
        env=os.environ | own_environment(tmp_path) | dict([variable]),
        stderr=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stderr and any("ingest" in line for line in run.stderr), "until the first stage runs"
        (server,) = servers()
        assert os.getpgid(server) != os.getpgid(run.pid)
        run.kill()
    wait_for(lambda: not servers(), 60, "end of the server")
