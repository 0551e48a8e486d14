"""``textmill up``: Prefect's server, a work pool, the deployments and a worker, for someone who starts with nothing."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path

from lm.errors import UserError

POOL = "local"
_START_SECONDS = 180
_STOP_SECONDS = 45  # a worker gives its runs 30


def start_prefect(port: int) -> None:
    """Start what is not there yet, say how to use it, and stay until Ctrl-C; then stop what was started."""
    if not Path("prefect.yaml").exists():
        raise UserError("There is no prefect.yaml here; run textmill up in a checkout of the project.")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background process would ignore the first
        signal.signal(number, signal.default_int_handler)
    url = f"http://127.0.0.1:{port}"
    environment = {
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # how soon a run starts that nobody tells the worker of
        **os.environ,
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_LOGGING_LEVEL": "INFO",  # over the other commands', whose runs speak in the terminal
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PWD": str(Path.cwd()),  # where prefect.yaml says that the runs work
    }
    with ExitStack() as stack:
        processes = []
        if not _answers(url):
            start = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
            processes.append(stack.enter_context(_running(start, environment)))
            _wait(url, processes[0])
        if subprocess.run(_command(["work-pool", "inspect", POOL]), env=environment, capture_output=True).returncode:
            _do(["work-pool", "create", POOL, "--type", "process"], environment)
        _do(["deploy", "--all"], environment)
        processes.append(stack.enter_context(_running(["worker", "start", "--pool", POOL], environment)))
        print(
            f"The UI is at {url}. In another terminal:\n"
            f"  export PREFECT_API_URL={url}/api\n"
            "  prefect deployment run 'pipeline/full' --watch\n"
            "Ctrl-C stops everything here.",
            flush=True,
        )
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
        raise UserError("A process of Prefect has ended; its own lines above say why.")


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *arguments]


def _do(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(_command(arguments), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


@contextmanager
def _running(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    # A session of its own: Ctrl-C reaches this process alone, which then stops the others in their order.
    process = subprocess.Popen(_command(arguments), env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/health", timeout=5) as answer:  # nosec B310 # our own http://127.0.0.1
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # the second where something else than a web server answers
        return False


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"Prefect's server did not start at {url}; its own lines above say why. Is the port free?")
        time.sleep(0.3)
