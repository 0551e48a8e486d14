"""Prefect's temporary server, which Prefect starts for a run without a server of the user."""

import atexit
import subprocess
from types import SimpleNamespace
from typing import Any

from lm.common.child_process import import_environment


def tie_temporary_server() -> None:
    """Have Prefect start its temporary server so that it ends when this process has ended, and not earlier.

    Prefect's own start leaves it in the terminal's process group: Ctrl-C would end the server first, and Prefect would
    then wait for it for a minute. And Prefect ends it at the exit of the interpreter only, so that it would stay for
    good after a process that was killed. Prefect has no option for either.
    """
    from prefect.server.api import server

    module: Any = server
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _start_tied})


def _start_tied(args: list[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(args, env=env | import_environment(), start_new_session=True)
    null = subprocess.DEVNULL
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill "$1"', "sh", str(process.pid)],
        stdin=subprocess.PIPE,  # it reads the end of the file when this process has ended
        stdout=null,
        stderr=null,
        start_new_session=True,
    )
    atexit.register(_end, watcher)  # Prefect registers later, so it has ended the server by then
    return process


def _end(watcher: "subprocess.Popen[bytes]") -> None:
    watcher.kill()
    watcher.wait()
