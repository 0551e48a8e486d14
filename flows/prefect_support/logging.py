"""What Prefect shows of a run: its name, tags, log records and artifacts."""

import logging
import signal
import sys
from contextlib import suppress
from uuid import UUID

import prefect.artifacts
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run

from flows.prefect_support.server import is_server_unreachable
from flows.prefect_support.signals import find_interrupt, signal_number
from lm.common.errors import Stopped, UserError
from tasks.runs.run_record import run_name

log = logging.getLogger(__name__)

# Not Prefect's setting PREFECT_LOGGING_EXTRA_LOGGERS: it sets no level, warns outside of runs, and has no effect after
# Prefect is imported.
_api_handler = APILogHandler()
_api_handler.addFilter(lambda record: bool(FlowRunContext.get() or TaskRunContext.get()))


def name_run() -> str:
    """Return the name of the current run, in Prefect and under ``runs/``."""
    parameters = flow_run.parameters or {}
    chosen = getattr(parameters.get("config"), "chosen_name", "")
    return run_name(parameters.get("until"), chosen or flow_run.name or "run")


def tag_run(*tags: str) -> None:
    """Add tags to the current run. The UI filters runs by tags."""
    with suppress(Exception), get_client(sync_client=True) as client:  # a run without tags is still a good run
        client.update_flow_run(UUID(flow_run.id), tags={*flow_run.tags, *tags})


def send_logs_to_prefect() -> None:
    """Send the project's log records to Prefect, remove the traceback from the records of user errors, and report a
    signal that stops a run as what it is: Prefect calls it a crash.

    A server that cannot be reached is a user error too: it may end before the flow reports its last state.
    """
    for name in ("lm", "tasks", "flows", "textmill"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_api_handler)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_remove_traceback)
        logging.getLogger(name).addFilter(_name_signal)


def _remove_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error and (isinstance(error, (UserError, Stopped)) or is_server_unreachable(error)):
        record.exc_info = None
    return True


def _name_signal(record: logging.LogRecord) -> bool:
    is_crash = record.getMessage().startswith("Crash detected!")
    if is_crash and (interrupt := find_interrupt(sys.exc_info()[1])):  # Prefect logs in its except block
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "Stopped by %s.", (signal.Signals(signal_number(interrupt)).name,)
    return True


class ArtifactPublisher:
    """Publishes Markdown artifacts of the current run.

    It stops after the first failure to reach Prefect's server, because each further attempt would take a minute.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_server_gone = False

    def publish(self, name: str, markdown: str, description: str) -> None:
        """Publish Markdown as the artifact ``<label>-<name>``. A failure is only logged.

        Prefect's keys have no underscores: they become dashes.
        """
        if self._is_server_gone:
            return
        try:
            key = f"{self._label}-{name}".replace("_", "-")
            prefect.artifacts.create_markdown_artifact(markdown, key=key, description=description)
        except Exception as error:  # an artifact only describes outputs that exist already
            self._is_server_gone = is_server_unreachable(error)
            suffix = "; no more artifacts are published" if self._is_server_gone else ""
            log.warning("Cannot publish the artifact %s in Prefect%s: %s", name, suffix, error)
