"""The project's log lines in the terminal."""

import logging
import sys

from tqdm import tqdm

from tasks.runtime.stage import group_log


class _ConsoleHandler(logging.Handler):
    """Prints log lines above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != group_log.name or record.levelno > logging.INFO:  # a progress bar counts the parts
            tqdm.write(self.format(record), file=sys.stderr)


_console_handler = _ConsoleHandler()
_console_handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))


def log_to_console() -> None:
    """Print the project's log lines from level INFO to stderr."""
    for name in ("lm", "tasks", "flows"):
        logger = logging.getLogger(name)
        logger.propagate = False  # the root logger has Prefect's console handler
        logger.setLevel(logging.INFO)
        logger.addHandler(_console_handler)
