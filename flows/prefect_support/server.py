"""Prefect's server: the settings that name one, mistakes in them, and the temporary server of a run without one.

Prefect reads its settings when it is imported. The functions that are called before a flow starts do not import it.
"""

import atexit
import logging
import os
import re
import subprocess
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from lm.common.errors import MachineError, UserError
from lm.common.processes import import_environment

_started: "list[_TiedServer]" = []


def find_prefect_home() -> Path:
    """Return Prefect's directory."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def explain_home_error(home: Path, error: OSError) -> UserError:
    """Return a UserError that names Prefect's directory, which cannot be written."""
    return UserError(
        f"Prefect's directory {home} cannot be written: {error.strerror}. Set PREFECT_HOME to another directory."
    )


def _settings_files() -> list[Path]:
    """Return the files that exist and can have settings of Prefect."""
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or find_prefect_home() / "profiles.toml")
    files = [profiles, *map(Path, (".env", "prefect.toml", "pyproject.toml"))]
    return [file for file in files if file.is_file()]


def is_server_configured() -> bool:
    """Return whether Prefect's settings name a server. Import Prefect only if a settings file may name one."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    try:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in _settings_files()]
    except OSError as error:
        raise UserError(
            f"{error.filename}, which may have settings of Prefect, cannot be read: {error.strerror}."
        ) from None
    if not any("PREFECT_API_URL" in text or "tool.prefect" in text or "[api]" in text for text in texts):
        return False
    from prefect.settings import get_current_settings

    return bool(get_current_settings().api.url)


def mute_settings_errors() -> None:
    """Have Prefect print nothing about mistakes that :func:`explain_settings_error` names.

    Prefect also reads a .env of other programs, and logs each line there that is no assignment.
    """
    for name in ("dotenv", "prefect.plugins"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "Failed to load profiles", UserWarning)


def explain_settings_error(error: BaseException) -> UserError | None:
    """Return a UserError that names the variable or the file if Prefect's settings raised ``error``, else None."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    if not isinstance(error, ValueError) or not any(module.startswith("prefect.settings") for module in modules):
        return None
    files = _settings_files()
    if problems := _describe_values(error, files) or _describe_files(files):
        return UserError(f"Prefect's settings cannot be read: {' '.join(problems)}")
    places = ", ".join(["environment variables PREFECT_…", *map(str, files)])
    return UserError(f"Prefect's settings cannot be read: {error}. They come from: {places}.")


def _describe_values(error: Any, files: list[Path]) -> list[str]:
    """Return a description of each value that pydantic refuses."""
    problems = []
    for problem in error.errors() if hasattr(error, "errors") else []:
        if problem["type"] == "default_factory_not_called":  # it follows from another problem
            continue
        field, value = "_".join(map(str, problem["loc"])), str(problem["input"])
        names = [
            name
            for name, text in os.environ.items()
            if name.startswith("PREFECT_") and name.endswith(field.upper()) and text.upper() == value.upper()
        ]
        named = [file for file in files if value.lower() in file.read_text(errors="replace").lower()]
        places = names or [f"{field} in {file.absolute()}" for file in named] or [field]
        problems.append(f"{' or '.join(places)} is {value!r}. {problem['msg']}.")
    return problems


def _describe_files(files: list[Path]) -> list[str]:
    """Return a description of each file that is no text or no TOML."""
    problems = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".toml":
                tomllib.loads(text)
        except (OSError, ValueError) as error:
            problems.append(f"{file.absolute()}: {error}. Repair the file.")
    return problems


@contextmanager
def server_for_flow() -> Iterator[None]:
    """Call flows of this process in this context: without a configured server, Prefect starts a temporary one.

    Raises UserError if Prefect's server is unreachable or refuses the run, or if its temporary server is switched off
    or does not start.
    """
    from prefect import tags
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if not settings.api.url:
        if not settings.server.ephemeral.enabled:
            raise UserError(
                "Prefect's setting PREFECT_SERVER_ALLOW_EPHEMERAL_MODE is false, and PREFECT_API_URL is not set. "
                "Set PREFECT_API_URL to the URL of a server, or remove the setting to run without one."
            )
        try:
            settings.home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=settings.home):
                pass
        except OSError as error:
            raise explain_home_error(settings.home, error) from None
        tie_temporary_server()
    with tags("textmill"):  # from the start: heartbeats have the tags of the start
        try:
            yield
        except Exception as error:
            if explained := explain_server_error(error, settings):
                raise explained from error
            raise


def is_server_unreachable(error: BaseException) -> bool:
    """Return whether Prefect's server cannot be reached. Prefect's client wraps some of these errors."""
    import httpx

    return any(isinstance(cause, httpx.TransportError) for cause in (error, error.__cause__))


def explain_server_error(error: Exception, settings: Any) -> UserError | None:
    """Return a UserError for a failure of Prefect's server, and None for another error."""
    from prefect.exceptions import PrefectHTTPStatusError

    if "ephemeral Prefect API server" in str(error):
        return UserError(
            "Prefect's temporary server did not start in "
            f"{settings.server.ephemeral.startup_timeout_seconds} s. Run the same command again "
            "when the machine is less busy, or set PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS to more."
        )
    server = f"Prefect's server at {settings.api.url}"
    if is_server_unreachable(error) and not settings.api.url:
        return UserError(
            f"Prefect's temporary server has ended or does not answer: {error}. Finished work is kept; run the same "
            "command again to continue."
        )
    if is_server_unreachable(error):
        return UserError(
            f"{server} cannot be reached: {error}. Finished work is kept; start the server and run the same command "
            "again, or unset PREFECT_API_URL to run without one."
        )
    if isinstance(error, PrefectHTTPStatusError) and error.response.status_code in (401, 403):
        return UserError(
            f"{server} refuses this client: {str(error).splitlines()[0]}. Set PREFECT_API_KEY, or for a server of your "
            "own PREFECT_API_AUTH_STRING, to what it expects."
        )
    if "Failed to reach API" in str(error):
        return UserError(
            f"{server} does not answer like one. PREFECT_API_URL ends with /api, such as http://127.0.0.1:4200/api; "
            "unset it to run without a server."
        )
    return None


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
    return bool(_started) and subprocess.Popen.poll(_started[-1]) is not None


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
            return 3  # the port is taken: Prefect then tries another one
        raise MachineError(self._explain_end(code))

    def _explain_end(self, code: int) -> str:
        from prefect.settings import get_current_settings

        output = ""
        if self._output:
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")
        lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"exit code {code}."]
        error_line = r"[\w.]*(?:Error|Exception): .*"  # the last line of a traceback
        reason = next((line for line in reversed(lines) if re.fullmatch(error_line, line)), lines[-1])
        return (
            f"Prefect's temporary server ended at its start: {reason}\n"
            f"Its files and its database are in {get_current_settings().home}. If another version of Prefect made the "
            "database, or if it is damaged, set PREFECT_HOME to another directory: use one for each version of Prefect."
        )

    def send_signal(self, sig: int) -> None:
        """Send a signal. From now on the server can end without an error."""
        self._can_end = True
        super().send_signal(sig)


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
