"""Log lines and messages of a command on stderr. If they cannot be written, the command goes on."""

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm

from tasks.runtime.stage import group_log


class _ConsoleHandler(logging.Handler):
    """Prints log lines above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != group_log.name or record.levelno > logging.INFO:  # a progress bar counts the groups
            try:
                tqdm.write(self.format(record), file=sys.stderr)
            except Exception:  # a log line that cannot be written must not end a training
                self.handleError(record)


_console_handler = _ConsoleHandler()
_console_handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))


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
    if sys.stdin is None:  # input would fail
        sys.stdin = _open_null_device("r")
    if sys.stderr is None:  # print and tqdm would write to stdout
        sys.stderr = _open_null_device("w")


def _open_null_device(mode: str) -> Any:
    return open(os.devnull, mode, encoding="utf-8")  # open until the process ends


def print_message(message: str) -> None:
    """Print a message to stderr, unless it cannot be written."""
    with suppress(OSError):
        print(message, file=sys.stderr)


def flush_messages() -> None:
    """Write what is left for stderr, or discard it: else Python fails when it flushes at the end."""
    try:
        sys.stderr.flush()
    except OSError:
        discard_stream(sys.stderr)


def discard_stream(stream: TextIO) -> None:
    """Discard what a stream has not written yet and will write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
