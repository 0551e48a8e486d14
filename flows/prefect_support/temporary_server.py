"""Prefect's temporary server, which Prefect starts for a run without a server of the user."""

import atexit
import re
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

from lm.common.errors import MachineError
from lm.common.processes import import_environment

_PORT_TAKEN_CODE = 3  # Prefect then tries another port
_ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception): .*")  # the last line of a traceback
_started: "list[_TiedServer]" = []


def tie_temporary_server() -> None:
    """Have Prefect start its temporary server so that it ends when this process has ended, and not earlier. A server
    that ends at its start raises MachineError with its reason.

    Prefect's own start leaves it in the terminal's process group: Ctrl-C would end the server first, and Prefect would
    then wait for it for a minute. And Prefect ends it at the exit of the interpreter only, so that it would stay for
    good after a process that was killed. Prefect also waits for a server that has ended. It has no option for these.
    """
    from prefect.server.api import server

    module: Any = server
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _TiedServer})


def has_temporary_server_ended() -> bool:
    """Return whether this process has started a temporary server that does not run any more."""
    return bool(_started) and _started[-1].has_ended()


class _TiedServer(subprocess.Popen[bytes]):
    """The process of the server. Prefect polls it only while it waits for the start."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        self._can_end = False
        self._port = int(args[args.index("--port") + 1])
        # The level of the handler is for the terminal of this process. The server has its own level.
        env = env | import_environment() | {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "NOTSET"}
        self._output = None
        if env.get("PREFECT_SERVER_LOGGING_LEVEL") == "CRITICAL":  # nobody wants to see the log
            env["PREFECT_SERVER_LOGGING_LEVEL"] = "ERROR"  # it has the reason of a failed start
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 # the server writes to it
        super().__init__(args, env=env, stdout=self._output, stderr=self._output, start_new_session=True)
        # Prefect registers later, so it has ended the server by then.
        atexit.register(end_watcher, start_watcher(self.pid))
        _started.append(self)

    def poll(self) -> int | None:
        """Return the exit code, or None while the server runs. Raise MachineError if it has ended at its start."""
        from prefect.server.api.server import SubprocessASGIServer

        code = super().poll()
        if code is None or self._can_end:
            return code
        self._can_end = True
        if not SubprocessASGIServer.is_port_available(self._port):
            return _PORT_TAKEN_CODE
        output = ""
        if self._output:
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")
        raise MachineError(_explain_end(code, output))

    def has_ended(self) -> bool:
        """Return whether it has ended, also after its start."""
        return super().poll() is not None

    def send_signal(self, sig: int) -> None:
        """Send a signal. From now on the server can end without an error."""
        self._can_end = True
        super().send_signal(sig)


def _explain_end(code: int, output: str) -> str:
    from prefect.settings import get_current_settings

    lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"exit code {code}."]
    reason = next((line for line in reversed(lines) if _ERROR_LINE.fullmatch(line)), lines[-1])
    return (
        f"Prefect's temporary server ended at its start: {reason}\n"
        f"Its files and its database are in {get_current_settings().home}. If another version of Prefect made the "
        "database, or if it is damaged, set PREFECT_HOME to another directory: use one for each version of Prefect."
    )


def start_watcher(pid: int) -> "subprocess.Popen[bytes]":
    """Start a process that sends SIGTERM to process ``pid`` when this process has ended, also if it was killed."""
    null = subprocess.DEVNULL
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill "$1"', "sh", str(pid)],
        stdin=subprocess.PIPE,  # it reads the end of the file when this process has ended
        stdout=null,
        stderr=null,
        start_new_session=True,
    )


def end_watcher(watcher: "subprocess.Popen[bytes]") -> None:
    """End a process of :func:`start_watcher`, whose process has ended."""
    watcher.kill()
    watcher.wait()
