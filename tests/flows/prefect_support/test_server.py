"""Prefect's server: mistakes in its settings, one that fails, and the temporary one, before, during and after a run."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    get_current_settings,
    temporary_settings,
)

from flows.prefect_support.server import (
    _TiedServer,
    explain_settings_error,
    has_temporary_server_ended,
    server_for_flow,
)
from lm.common.errors import MachineError, UserError
from tests.helpers.deployed import TEXTMILL, free_port, own_environment
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT, processes_with_variable
from textmill.cli.main import main

SHELL_LINES = "if true; then\n  make all\nfi\n" * 5


@pytest.fixture(autouse=True)
def _no_earlier_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.prefect_support.server._started", [])


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
            settings = temporary_settings({PREFECT_API_URL: url})
            with settings, pytest.raises(UserError, match=f"{url}.*{message}"), server_for_flow():
                empty()
        finally:
            server.shutdown()


def test_a_temporary_server_that_ended_during_a_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_server() -> None:
        raise httpx.ConnectError("Connection refused")

    monkeypatch.setattr("flows.prefect_support.server.tie_temporary_server", lambda: None)
    settings = temporary_settings({PREFECT_HOME: tmp_path}, restore_defaults={PREFECT_API_URL})
    message = r"temporary server has ended or .*: Connection refused"
    with settings, pytest.raises(UserError, match=message) as caught, server_for_flow():
        lose_server()
    assert "PREFECT_API_URL" not in str(caught.value)


def test_a_home_of_prefect_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    settings = temporary_settings({PREFECT_HOME: home}, restore_defaults={PREFECT_API_URL})
    with settings, pytest.raises(UserError, match=f"{home} cannot be written.*PREFECT_HOME"), server_for_flow():
        empty()


@pytest.mark.usefixtures("prefect_server")
def test_a_run_has_the_tag_of_the_automations_from_its_start() -> None:
    with server_for_flow():
        state = empty(return_state=True)
    with get_client(sync_client=True) as client:
        run_id = state.state_details.flow_run_id
        assert run_id and client.read_flow_run(run_id).tags == ["textmill"]


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
def test_the_log_in_the_ui_of_a_run_has_its_errors_and_the_terminal_has_no_lines_of_prefect(tmp_path: Path) -> None:
    """The message of a mistake, and the traceback of a bug."""
    (tmp_path / "broken.py").write_text(
        "import sys\nimport tasks.ingest\n"
        "def body(out, **inputs):\n    raise ZeroDivisionError('a bug in the stage')\n"
        "tasks.ingest.ingest.body = body\n"
        "from textmill.cli.main import main\n"
        "for number, train in enumerate(sys.argv[2:]):\n"
        "    main(['run', '--root', f'{sys.argv[1]}-{number}', '--data.train', train])\n"
    )
    # The bug is last, as it ends the process.
    expected = {"missing.txt": "missing.txt does not exist", "demo:20": "ZeroDivisionError: a bug in the stage"}
    environment = {"PREFECT_API_URL": str(get_current_settings().api.url), "PYTHONPATH": str(PROJECT)}
    environment = {**os.environ, **own_environment(tmp_path), **environment}
    command = [sys.executable, "broken.py", str(tmp_path / "root"), *expected]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert " | ERROR" not in done.stderr, done.stderr

    def error_lines(root: str) -> list[str]:
        with get_client(sync_client=True) as client:
            (run,) = [run for run in client.read_flow_runs() if run.parameters.get("root") == root]
            lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
        return [line.message for line in lines if line.level >= logging.ERROR]

    def has_error(root: str, error: str) -> bool:
        return any(error in line for line in error_lines(root))

    for number, error in enumerate(expected.values()):
        assert error in done.stderr, done.stderr
        root = str(tmp_path / f"root-{number}")
        wait_for(partial(has_error, root, error), 60, "the error in Prefect's log")
        has_traceback = any("Traceback" in line and error in line for line in error_lines(root))
        assert has_traceback == ("bug" in error)


# A mistake: an environment variable with the value "many", a file of settings with its content, and the message.
MISTAKES = [
    ("PREFECT_TASKS_DEFAULT_RETRIES", ".env", SHELL_LINES, "PREFECT_TASKS_DEFAULT_RETRIES is 'many'"),
    ("PREFECT_LOGGING_LEVEL", "", "", "PREFECT_LOGGING_LEVEL is 'MANY'"),
    ("", ".env", "PREFECT_TASKS_DEFAULT_RETRIES=many\n", "default_retries in {home}/.env is 'many'"),
    ("", "profiles.toml", 'active = "x\n', "{home}/profiles.toml: Illegal character"),
    ("", "pyproject.toml", "[tool.prefect\n", "{home}/pyproject.toml: Expected"),
    ("", ".env", "\udcff\udcfe\0", "{home}/.env: 'utf-8' codec"),
]
# Prefect reads its settings when it is imported, which each child does. They share the import of what Prefect imports.
_RUN_IN_EACH_FOLDER = """
import json, os, sys
import griffe, httpx, jsonschema, opentelemetry.metrics, pendulum, prometheus_client, pydantic_settings, rich.console
import websockets.asyncio.client
from textmill.cli import run
from textmill.cli.main import main
for folder, environment in json.load(sys.stdin):
    if not (child := os.fork()):
        os.chdir(folder)
        os.environ.update(environment)
        os.dup2(os.open("../" + os.path.basename(folder) + ".log", os.O_WRONLY | os.O_CREAT), 2)
        sys.exit(main(["run", "--root", folder + "-root"]))
    assert os.waitpid(child, 0)[1] == 2 << 8, folder
"""


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder and a log of ``textmill run`` for each of ``MISTAKES``."""
    home = tmp_path_factory.mktemp("mistaken")
    runs: list[tuple[str, dict[str, str]]] = []
    for number, (variable, file, content, _) in enumerate(MISTAKES):
        folder = home / str(number)
        folder.mkdir()
        if file:
            (folder / file).write_bytes(content.encode(errors="surrogateescape"))
        profiles = {"PREFECT_PROFILES_PATH": str(folder / "profiles.toml")}
        runs.append((str(folder), profiles | ({variable: "many"} if variable else {})))
    environment = os.environ | own_environment(home) | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", _RUN_IN_EACH_FOLDER]
    done = subprocess.run(
        command, cwd=home, env=environment, input=json.dumps(runs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return home


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[message for *_, message in MISTAKES])
def test_a_mistake_in_a_setting_is_one_message(mistaken: Path, number: int) -> None:
    message = MISTAKES[number][-1].format(home=mistaken / str(number))
    log = (mistaken / f"{number}.log").read_text(encoding="utf-8")
    assert log.startswith("textmill: Prefect's settings cannot be read: "), log
    assert message in log and len(log.splitlines()) == 1, log


def test_an_error_of_another_place_is_not_explained() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("many")
    assert explain_settings_error(caught.value) is None


def test_a_temporary_server_that_is_switched_off_is_named() -> None:
    settings = temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}, restore_defaults={PREFECT_API_URL})
    message = "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE is false, and PREFECT_API_URL"
    with settings, pytest.raises(UserError, match=message), server_for_flow():
        empty()


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert main([command]) == 2
    assert "The working directory cannot be used: No such file" in capsys.readouterr().err


def start(program: str, port: int, level: str = "CRITICAL") -> _TiedServer:
    command = [sys.executable, "-c", program, "--port", str(port)]
    return _TiedServer(args=command, env={"PREFECT_SERVER_LOGGING_LEVEL": level})


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('starting'); import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError(28, 'No space left on device')\n", r"OSError: \[Errno 28\] No space left on device"),
        ("print('at an end'); raise SystemExit(4)", "at an end"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_server_that_ends_at_its_start_gives_its_reason_once(program: str, reason: str) -> None:
    server = start(program, free_port())
    with pytest.raises(MachineError, match=rf"ended at its start: {reason}(?s:.*)set PREFECT_HOME"):
        wait_for(lambda: server.poll() is not None, 60, "end of the server")
    server.terminate()  # as Prefect does at the exit
    assert server.wait(5)


def test_prefect_tries_another_port_if_another_program_took_this_one() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        server = start("raise SystemExit(1)", other.getsockname()[1])
        server.wait(60)
        assert server.poll() == 3


def test_a_server_that_is_stopped_is_no_error() -> None:
    server = start("import time; time.sleep(100)", free_port())
    assert server.poll() is None
    server.terminate()
    server.wait(60)
    assert server.poll() == -15


def test_a_server_that_ends_after_its_start_is_noticed() -> None:
    server = start("import time; time.sleep(100)", free_port())
    assert not has_temporary_server_ended()
    os.kill(server.pid, signal.SIGKILL)
    wait_for(has_temporary_server_ended, 60, "end of the server")


def test_the_output_is_shown_if_the_user_asks_for_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    for level, is_shown in {"INFO": True, "CRITICAL": False}.items():
        start("print('a line of the log')", free_port(), level).wait(60)
        assert ("a line of the log" in capfd.readouterr().out) == is_shown
