"""Deployments: the end of a run of one, and ``textmill up``: its end, a second one, and runs beside it.

Sleeping processes play Prefect's.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed, Running

from flows.pipeline import pipeline
from flows.prefect_support import deployments
from flows.prefect_support.server import find_prefect_home
from lm.common.errors import UserError
from tests.helpers.deployed import TINY
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT, processes_with_variable

_PREFECT = "trap 'sleep 0.5; touch ended-$$; exit' TERM; touch started-$$; while :; do sleep 0.1; done"
_UP = f"""
import fcntl, os, sys, termios
from flows import deploy
from flows.prefect_support import deployments
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # become the program of this terminal
answers = iter([False])
deployments._prefect_command = lambda arguments: ["/bin/sh", "-c", {_PREFECT!r}]
deploy.create_deployments = lambda *arguments: None
deployments.is_server_healthy = lambda url: HAS_SERVER or next(answers, True)
from textmill.cli.main import main
sys.exit(main(["up", "--port=PORT"]))
"""

_RUN = """
import sys
from textmill.cli import run
from textmill.cli.main import main
def report(options):
    from prefect.settings import get_current_settings
    print(get_current_settings().api.url)
run.{name}_command = report
sys.exit(main({arguments}))
"""
_PROFILES = """
active = "mine"
[profiles.mine]
[profiles.other]
PREFECT_API_URL = "http://elsewhere/api"
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
    port: int, has_server: bool = False, variables: Mapping[str, str] | None = None, terminal: int | None = None
) -> "subprocess.Popen[str]":
    """Start ``textmill up`` with processes that sleep, and need half a second to end."""
    script = _UP.replace("PORT", str(port)).replace("HAS_SERVER", str(has_server))
    directory = Path(os.environ["PREFECT_HOME"]).parent
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **(variables or {})},
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        text=True,
    )


def read_until_ready(output: Iterable[str] | None) -> str:
    """Return the last line of what ``textmill up`` prints when it is ready."""
    assert output
    return next(line for line in output if line.startswith("Ctrl-C"))


def count_files(home: Path, pattern: str) -> int:
    """Return the number of files that the processes made beside Prefect's directory."""
    return len(list(home.parent.glob(pattern)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGKILL],
    ids=["SIGHUP", "SIGTERM", "SIGINT", "SIGKILL"],
)
def test_each_end_of_it_ends_the_server_and_the_worker(home: Path, number: signal.Signals) -> None:
    variable = ("LOCAL_STACK_TEST", uuid.uuid4().hex)
    with start_up(1, variables=dict([variable])) as process:
        assert read_until_ready(process.stdout) == "Ctrl-C stops everything here.\n"
        wait_for(lambda: count_files(home, "started-*") == 2, 20, "start of the processes")
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not processes_with_variable(*variable), 20, "end of the processes")
    assert count_files(home, "ended-*") == 2, "each had the time that it needed"


def test_a_closed_terminal_ends_the_server_and_the_worker(home: Path) -> None:
    """It sends SIGHUP, the shell in it sends one more, and nothing can be written to it any more."""
    variable = ("LOCAL_STACK_TEST", uuid.uuid4().hex)
    ours, terminal = os.openpty()
    with start_up(1, variables=dict([variable]), terminal=terminal) as process:
        os.close(terminal)
        with open(ours) as output:
            read_until_ready(output)
            wait_for(lambda: count_files(home, "started-*") == 2, 20, "start of the processes")
        time.sleep(0.2)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
    assert not processes_with_variable(*variable)
    assert count_files(home, "ended-*") == 2, "each had the time that it needed"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "second_port", [pytest.param(1, marks=pytest.mark.slow, id="same port"), pytest.param(2, id="another port")]
)
def test_a_second_one_is_refused_while_the_first_runs(second_port: int) -> None:
    with start_up(1) as first:
        read_until_ready(first.stdout)
        with start_up(second_port) as second:
            _, message = second.communicate(timeout=60)
            assert second.returncode == 2
            assert "Another textmill up runs at http://127.0.0.1:1. Stop it first" in message
        first.kill()
    with start_up(second_port) as third:
        read_until_ready(third.stdout)
        third.terminate()


@pytest.mark.usefixtures("home")
def test_a_server_that_ran_before_is_not_said_to_be_stopped() -> None:
    with start_up(1, has_server=True) as process:
        assert "The server ran before and goes on" in read_until_ready(process.stdout)
        process.terminate()


def reported_server(arguments: list[str], **variables: str) -> tuple[str, str]:
    """Return the URL of the API that the flow of a command would report to, and the command's messages."""
    script = _RUN.format(name=arguments[0], arguments=arguments)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    directory = Path(os.environ["PREFECT_HOME"]).parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_run_beside_it_uses_its_server(home: Path, port: int) -> None:
    with start_up(port) as process:
        read_until_ready(process.stdout)
        (home / "profiles.toml").write_text(_PROFILES)  # the profile that names a server is not active
        url, messages = reported_server(["sweep", "learning-rate"])
        assert url == f"http://127.0.0.1:{port}/api"
        assert f"reports to the server of textmill up, http://127.0.0.1:{port}." in messages
        assert reported_server(["run"], PREFECT_PROFILE="other") == ("http://elsewhere/api", "")
        assert reported_server(["run"], PREFECT_API_URL="http://elsewhere/api") == ("http://elsewhere/api", "")
        process.kill()
    assert (home / "textmill-up.url").exists()
    assert reported_server(["run"]) == ("None", ""), "it was killed"


def test_the_directory_of_prefect_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("~/mine", str(tmp_path / "mine")):
        monkeypatch.setenv("PREFECT_HOME", value)
        assert find_prefect_home() == tmp_path / "mine"
    monkeypatch.delenv("PREFECT_HOME")
    assert find_prefect_home() == tmp_path / ".prefect"


class FailingClient:
    """Fails ``failures`` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def read_flow_run(self, run_id: str) -> Any:
        self.failures -= 1
        if self.failures >= 0:
            raise httpx.HTTPStatusError("500", request=httpx.Request("GET", "http://s"), response=httpx.Response(500))
        return SimpleNamespace(state="running")


def test_a_failure_of_the_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "_RUN_POLL_SECONDS", 0.0)
    assert deployments._read_state(FailingClient(3), "x") == "running"
    monkeypatch.setattr(deployments, "_PATIENCE_SECONDS", 0.0)
    with pytest.raises(httpx.HTTPStatusError):
        deployments._read_state(FailingClient(3), "x")


@pytest.mark.usefixtures("prefect_server")
def test_a_missing_deployment_is_named_before_the_first_stage(tmp_path: Path) -> None:
    config: Any = TINY | {"execution": {"train_deployment": "pipeline/none"}}  # Prefect makes a PipelineConfig of it
    with pytest.raises(UserError, match=r"train_deployment names pipeline/none, but there is no such deployment"):
        pipeline(config, str(tmp_path))
    assert not list(tmp_path.glob("*/*/manifest.json"))


@flow
def parent() -> None:
    """Wait for a run of a deployment."""
    deployments.run_deployment_to_end("child/gpu", {})


@contextmanager
def worker(state: State[Any]) -> Iterator[None]:
    """Give the first run of the deployment ``child/gpu`` a state, as a worker does."""

    def work() -> None:
        with get_client(sync_client=True) as client:
            while not stop.wait(0.2):
                for run in client.read_flow_runs():
                    if run.deployment_id == deployment and run.state and not run.state.is_final():
                        client.set_flow_run_state(run.id, Running(), force=True)
                        client.set_flow_run_state(run.id, state, force=True)

    stop = threading.Event()
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow_from_name("child"), "gpu")
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("state", [Completed(), Failed(message="no memory")], ids=["completed", "failed"])
def test_a_run_of_a_deployment_has_its_name_in_the_graph(monkeypatch: pytest.MonkeyPatch, state: State[Any]) -> None:
    monkeypatch.setattr(deployments, "_RUN_POLL_SECONDS", 0.1)
    with worker(state):
        if state.is_completed():
            parent()
        else:
            with pytest.raises(UserError, match="child/gpu ended in the state Failed: no memory"):
                parent()

    def read_latest() -> bool:
        latest = max(client.read_task_runs(), key=attrgetter("created"), default=None)
        return latest is not None and (latest.name, latest.state_name) == ("child/gpu", state.name)

    with get_client(sync_client=True) as client:
        wait_for(read_latest, 30, f"record of the task run child/gpu as {state.name}")
