"""Flows in the process of a command: mistakes in Prefect's settings, and the end of its temporary server."""

import logging
import os
import subprocess
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    get_current_settings,
    temporary_settings,
)

from lm.common.errors import UserError
from tests.helpers.deployed import TEXTMILL, own_environment
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT, processes_with_variable
from textmill.cli import local_run
from textmill.cli.local_run import run_flow


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


def test_a_temporary_server_that_ended_during_a_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_server() -> None:
        raise httpx.ConnectError("Connection refused")

    monkeypatch.setattr(local_run, "tie_temporary_server", lambda: None)
    settings = temporary_settings({PREFECT_HOME: tmp_path}, restore_defaults={PREFECT_API_URL})
    with settings, pytest.raises(UserError, match=r"temporary server has ended or .*: Connection refused") as caught:
        run_flow(lose_server)
    assert "PREFECT_API_URL" not in str(caught.value)


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


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("train", "expected"),
    [("demo:20", "ZeroDivisionError: a bug in the stage"), ("missing.txt", "missing.txt does not exist")],
)
def test_the_log_in_the_ui_of_a_run_has_its_errors_and_the_terminal_has_no_lines_of_prefect(
    tmp_path: Path, train: str, expected: str
) -> None:
    """The traceback of a bug, and the message of a mistake."""
    (tmp_path / "broken.py").write_text(
        "import sys\nimport tasks.ingest\n"
        "def body(out, **inputs):\n    raise ZeroDivisionError('a bug in the stage')\n"
        "tasks.ingest.ingest.body = body\n"
        "from textmill.cli.main import main\nsys.exit(main())\n"
    )
    environment = {"PREFECT_API_URL": str(get_current_settings().api.url), "PYTHONPATH": str(PROJECT)}
    environment = {**os.environ, **own_environment(tmp_path), **environment}
    command = [sys.executable, "broken.py", "run", f"--root={tmp_path / 'root'}", "--data.train", train]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert expected in done.stderr and " | ERROR" not in done.stderr, done.stderr

    def error_lines() -> list[str]:
        with get_client(sync_client=True) as client:
            (run,) = [run for run in client.read_flow_runs() if run.parameters.get("root") == str(tmp_path / "root")]
            lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
        return [line.message for line in lines if line.level >= logging.ERROR]

    wait_for(lambda: any(expected in line for line in error_lines()), 60, "the error in Prefect's log")
    has_traceback = any("Traceback" in line and expected in line for line in error_lines())
    assert has_traceback == ("bug" in expected)
