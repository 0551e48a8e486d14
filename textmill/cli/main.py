"""The command ``textmill``: run a subcommand, and turn user errors, signals and a closed output into an exit code.

Log lines and messages go to stderr. If they cannot be written, the command goes on.
"""

import errno
import io
import logging
import os
import select
import sys
from typing import Any, TextIO

from tqdm import tqdm

from flows.prefect_support.deployments import find_local_stack
from flows.prefect_support.server import explain_settings_error, is_server_configured, mute_settings_errors
from flows.prefect_support.signals import STOPPED_MESSAGE, find_interrupt, handle_termination, signal_number
from lm.common.errors import UserError
from tasks.runtime.stage import group_log
from textmill.cli.parser import parse_command
from textmill.cli.terminal import LogFormatter, print_message

# Prefect and its ephemeral server read these settings when they are imported.
_PREFECT_SETTINGS = {
    # The terminal shows the project's own log lines. Prefect's UI shows Prefect's too, such as errors and tracebacks.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # Send no telemetry.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # On a busy machine, the ephemeral server needs more than the default 20 s to start.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success, also of ``serve``, which runs until it is stopped. 1: ``verify`` found damage. 2: a user error, printed
    as one message. 129: stopped by SIGHUP, as a closed terminal sends. 130: stopped by Ctrl-C. 141: nobody reads the
    output any more. 143: stopped by SIGTERM. Other exceptions are bugs and propagate.
    """
    handle_termination()
    prepare_streams()
    for name, value in _PREFECT_SETTINGS.items():
        os.environ.setdefault(name, value)
    mute_settings_errors()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command, options = parse_command(arguments)
        code = _prepare_command(command)(options) or 0
        if sys.stdout is not None:  # None: it was closed before the start
            sys.stdout.flush()
    except BaseException as error:
        if interrupt := find_interrupt(error):
            keeps_nothing = arguments[:1] in (["sample"], ["chat"], ["tokenizers"], ["export"], ["dialogs"])
            print_message("textmill: stopped." if keeps_nothing else STOPPED_MESSAGE)
            code = 128 + signal_number(interrupt)
        elif explained := error if isinstance(error, UserError) else explain_settings_error(error):
            print_message(f"textmill: {explained}", is_error=True)
            code = 2
        elif isinstance(error, BrokenPipeError) and _is_output_closed():  # e.g. head has read enough
            _discard_stream(sys.stdout)
            code = 141
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC and _is_output_full():
            _discard_stream(sys.stdout)
            print_message(f"textmill: The output cannot be written: {error.strerror}.", is_error=True)
            code = 2
        else:
            raise
    try:
        sys.stderr.flush()
    except OSError:  # Python would fail when it flushes at the end
        _discard_stream(sys.stderr)
    if states := sys.modules.get("flows.prefect_support.final_states"):  # otherwise no flow can have run
        states.exit_if_server_is_gone(code)
    return code


def _prepare_command(name: str) -> Any:
    """Return the function of a command. Show log lines, and report to a server, as the command does."""
    from textmill.cli import run, tools

    function = f"{name.replace('-', '_')}_command"
    starts_flow = hasattr(run, function)
    if name not in ("sample", "chat", "serve", "verify", "gc", "up"):
        log_to_console()
    # A temporary server would write the same database as that of a running textmill up.
    if starts_flow and not is_server_configured() and (url := find_local_stack()):
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        if "prefect" in sys.modules:  # it has read its settings already, to see whether they name a server
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
        print_message(f"This run reports to the server of textmill up, {url}.")
    return getattr(run if starts_flow else tools, function)


class _ConsoleHandler(logging.Handler):
    """Prints log lines above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != group_log.name or record.levelno > logging.INFO:  # a progress bar counts the groups
            try:
                tqdm.write(self.format(record), file=sys.stderr)
            except Exception:  # a log line that cannot be written must not end a training
                self.handleError(record)


_console_handler = _ConsoleHandler()
_console_handler.setFormatter(LogFormatter())


def log_to_console() -> None:
    """Print the project's log lines from level INFO to stderr."""
    for name in ("lm", "tasks", "flows", "textmill"):
        logger = logging.getLogger(name)
        logger.propagate = False  # the root logger has Prefect's console handler
        logger.setLevel(logging.INFO)
        logger.addHandler(_console_handler)


def prepare_streams() -> None:
    """Escape characters that stdout cannot encode. Open the null device in place of a closed stdin or stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:  # input would fail; print and tqdm would write to stdout
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 # until the process ends


def _discard_stream(stream: TextIO) -> None:
    """Discard what a stream has not written yet and will write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_output_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # it reports errors in any case
    return bool(poll.poll(0))


def _is_output_full() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False
