"""The command ``textmill up``: its end, a second one, and runs beside it. Sleeping processes play Prefect's."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows.cli import main as main_module
from flows.prefect_support import local_stack
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT, processes_with_variable

_UP = """
import sys
from flows.prefect_support import local_stack
answers = iter([False])
local_stack._prefect_command = lambda arguments: ["sleep", "1000"]
local_stack._run_prefect = lambda *arguments: None
local_stack.create_work_pools = lambda url: None
local_stack.is_server_healthy = lambda url: HAS_SERVER or next(answers, True)
from flows.cli.main import main
sys.exit(main(["up", "--port=PORT"]))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of Prefect."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path / "prefect"


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that answers as Prefect's does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def start_up(
    port: int, has_server: bool = False, variables: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start ``textmill up`` with processes that sleep."""
    script = _UP.replace("PORT", str(port)).replace("HAS_SERVER", str(has_server))
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=PROJECT,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until_ready(process: "subprocess.Popen[str]") -> str:
    """Return the last line of what ``textmill up`` prints when it is ready."""
    assert process.stdout
    return next(line for line in process.stdout if line.startswith("Ctrl-C"))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT], ids=["SIGHUP", "SIGTERM", "SIGINT"])
def test_a_closed_terminal_a_termination_and_ctrl_c_end_the_server_and_the_worker(number: signal.Signals) -> None:
    variable = ("LOCAL_STACK_TEST", uuid.uuid4().hex)
    with start_up(1, variables=dict([variable])) as process:
        assert read_until_ready(process) == "Ctrl-C stops everything here.\n"
        assert len(processes_with_variable(*variable)) == 3, "a server and a worker"
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    wait_for(lambda: not processes_with_variable(*variable), 10, "end of the processes")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("second_port", [1, 2], ids=["same port", "another port"])
def test_a_second_one_is_refused_while_the_first_runs(second_port: int) -> None:
    with start_up(1) as first:
        read_until_ready(first)
        with start_up(second_port) as second:
            _, message = second.communicate(timeout=60)
            assert second.returncode == 2
            assert "Another textmill up runs at http://127.0.0.1:1. Stop it first" in message
        first.kill()
    with start_up(second_port) as third:
        read_until_ready(third)
        third.terminate()


@pytest.mark.usefixtures("home")
def test_a_server_that_ran_before_is_not_said_to_be_stopped() -> None:
    with start_up(1, has_server=True) as process:
        assert "The server ran before and goes on" in read_until_ready(process)
        process.terminate()


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_run_beside_it_uses_its_server(
    home: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert command in main_module._RUN_FLOWS and local_stack.find_local_stack() == ""
    monkeypatch.setenv("PREFECT_API_URL", "")  # removed at the end of the test
    with start_up(port) as process:
        read_until_ready(process)
        main_module._use_local_stack()
        assert os.environ["PREFECT_API_URL"] == f"http://127.0.0.1:{port}/api"
        assert f"reports to the server of textmill up, http://127.0.0.1:{port}." in capsys.readouterr().err
        monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
        main_module._use_local_stack()
        assert os.environ["PREFECT_API_URL"] == "http://elsewhere/api", "the user's setting"
        process.kill()
    assert (home / "textmill-up.url").exists()
    assert local_stack.find_local_stack() == "", "it was killed"
