"""The process of Prefect's temporary server, here a short Python program, while Prefect waits for its start."""

import os
import signal
import socket
import sys

import pytest

from flows.prefect_support import temporary_server
from flows.prefect_support.temporary_server import _TiedServer, has_temporary_server_ended
from lm.common.errors import MachineError
from tests.helpers.deployed import free_port
from tests.helpers.limits import wait_for


@pytest.fixture(autouse=True)
def _no_earlier_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_server, "_started", [])


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
