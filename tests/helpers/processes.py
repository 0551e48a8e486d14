"""Processes that tests start: Python code in a process, and a guard that ends all of them."""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROJECT = Path(__file__).parents[2]
SESSION_VARIABLE = "TEXTMILL_TEST_SESSION"


@contextmanager
def python_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in a process with pipes for its input and output. Kill it at the end of the block."""
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, env=dict(os.environ), stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    """Wait for the next line of a process's output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def processes_with_variable(name: str, value: str) -> list[int]:
    """Return the ids of the processes that were started with an environment variable."""
    process_ids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{name}={value}".encode() in path.read_bytes().split(b"\0"):
                process_ids.append(int(path.parent.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return process_ids


def start_process_guard() -> None:
    """Start a process that kills all descendants of this process when this process has ended, however it ended.

    Descendants are found by an environment variable that they inherit, so sessions and process groups do not matter.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux
        return
    session = os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
    null, own_fd = subprocess.DEVNULL, os.pidfd_open(os.getpid())
    subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.processes", str(own_fd), session],
        cwd=PROJECT,
        env=environment,
        stdin=null,
        stdout=null,
        stderr=null,
        start_new_session=True,
        pass_fds=[own_fd],
    )
    os.close(own_fd)


def _guard(process_fd: int, session: str) -> None:
    select.select([process_fd], [], [])  # until the process has ended
    while process_ids := processes_with_variable(SESSION_VARIABLE, session):
        for descendant in process_ids:
            with suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
