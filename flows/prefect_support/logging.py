"""Log records of the project in Prefect."""

import logging

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from flows.prefect_support.liveness import is_server_unreachable
from lm.common.errors import Stopped, UserError

# Not Prefect's setting PREFECT_LOGGING_EXTRA_LOGGERS: it sets no level, warns outside of runs, and has no effect after
# Prefect is imported.
_api_handler = APILogHandler()
_api_handler.addFilter(lambda record: bool(FlowRunContext.get() or TaskRunContext.get()))


def send_logs_to_prefect() -> None:
    """Send the project's log records to Prefect, and remove the traceback from the records of user errors.

    A server that cannot be reached is one too: it may end before the flow reports its last state.
    """
    for name in ("lm", "tasks", "flows", "textmill"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_api_handler)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_remove_traceback)


def _remove_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error and (isinstance(error, (UserError, Stopped)) or is_server_unreachable(error)):
        record.exc_info = None
    return True
