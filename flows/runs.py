"""What Prefect knows of the runs: their names, one line for a failure, and an end for the runs whose process died."""

import hashlib
import logging
import os
import re
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import httpx
from filelock import FileLock, Timeout
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter, TaskRunFilterState
from prefect.client.schemas.filters import TaskRunFilterStateType as StateTypes
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed

from lm.errors import UserError
from tasks.machine import cache_directory
from tasks.stage import Stopped

log = logging.getLogger(__name__)

_KEEP_SECONDS = 30 * 24 * 3600
_held: list[FileLock] = []


def name_run() -> str:
    """The name of a run, in Prefect and below ``runs/``: when, how far, and the name that it was given."""
    name, parameters = flow_run.name or "run", flow_run.parameters or {}
    if re.match(r"\d{8}-\d{6}-", name):
        return name  # named already, and started again
    words = re.sub(r"[^\w.-]+", "-", f"{parameters.get('until') or 'full'}-{name}")
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{words}"


def tag_run(*tags: str) -> None:
    """Add tags to the run, by which the UI finds its like."""
    with suppress(Exception), get_client(sync_client=True) as client:  # the run is more than its tags
        client.update_flow_run(UUID(flow_run.id), tags={*flow_run.tags, *tags})


def _without_traceback(record: logging.LogRecord) -> bool:
    """Takes the traceback off the record of a failure that a user can mend: its message says it all."""
    if record.exc_info and isinstance(record.exc_info[1], (UserError, Stopped)):
        record.exc_info = None
    return True


_handler = APILogHandler()
_handler.addFilter(lambda record: bool(FlowRunContext.get() or TaskRunContext.get()))


def record_logs() -> None:
    """Have Prefect keep the project's log lines with the run and the task that they are of, and a user's mistake
    without its traceback."""
    for name in ("lm", "tasks", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(_handler)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


def keep_alive(run_id: str, start: int) -> None:
    """Settle the runs of this machine that died, so that Prefect does not show them as running for ever, and hold a
    lock for this one that the operating system takes back when the process ends, however it ends.

    The lock is never given back before: the run's last state reaches Prefect after the flow's function has returned.
    ``start`` counts how often the run was started: each has a lock of its own.
    """
    directory = _directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _settle(directory)
        lock = FileLock(directory / f"{run_id}_{start}.new")
        lock.acquire()
        # Only a locked file has the name that is looked for.
        Path(lock.lock_file).rename(directory / f"{run_id}_{start}.lock")
        _held.append(lock)
    except OSError as error:
        log.warning(
            "Should this run's process die, nobody will tell Prefect: %s cannot be written: %s", directory, error
        )


def is_unreachable(error: BaseException) -> bool:
    """Whether it is Prefect's server that cannot be reached; its client wraps some of these errors."""
    return any(isinstance(one, httpx.TransportError) for one in (error, error.__cause__))


def end_without_server(code: int) -> None:
    """End the process at once where it ran a flow and Prefect's server is gone: else each of the events that it was not
    told of would be tried for seconds. The next run settles this one."""
    if _held and get_current_settings().api.url:
        with get_client(sync_client=True) as client:
            is_gone = client.api_healthcheck() is not None
        if is_gone:
            print("Prefect's server does not answer; what it shows of this run is not all.", file=sys.stderr)
            sys.stdout.flush()
            os._exit(code)


def _directory() -> Path:
    """Locks of the runs that one Prefect database knows."""
    settings = get_current_settings()
    database = settings.api.url
    if not database and (connection := settings.server.database.connection_url):
        database = connection.get_secret_value()
    return cache_directory() / "runs" / hashlib.sha256(str(database).encode()).hexdigest()[:16]


def _settle(directory: Path) -> None:
    for path in directory.glob("*_*.lock"):
        with suppress(Timeout), FileLock(path, timeout=0):  # which a living run holds
            try:
                with get_client(sync_client=True) as client:
                    run_id, start = path.stem.split("_")
                    is_known = _end(client, UUID(run_id), int(start))
                # An unknown one may be of another database behind the same address, for a while.
                if is_known or time.time() - path.stat().st_mtime > _KEEP_SECONDS:
                    path.unlink()
            except Exception as error:  # settling is a courtesy to the past; this run goes on
                log.warning("Prefect could not be told that the process of run %s has ended: %s", path.stem, error)


def _end(client: SyncPrefectClient, run_id: UUID, start: int) -> bool:
    """Settle a run whose process has ended; False when Prefect does not know it. One that was started again since, or
    waits for that, is none of the dead."""
    try:
        run = client.read_flow_run(run_id)
    except ObjectNotFound:
        return False
    waits = run.state and run.state.type in (StateType.SCHEDULED, StateType.PENDING, StateType.PAUSED)
    if waits or run.run_count > start:
        return True
    message = f"Its process died; found by run {flow_run.name}."
    unfinished = TaskRunFilter(state=TaskRunFilterState(type=StateTypes(any_=[StateType.RUNNING, StateType.PENDING])))
    for task_run in client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])), task_run_filter=unfinished
    ):
        client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
    if run.state and not run.state.is_final():
        is_cancelled = run.state.type == StateType.CANCELLING
        client.set_flow_run_state(run_id, (Cancelled if is_cancelled else Crashed)(message=message), force=True)
        log.info("Run %s is settled as %s: its process died.", run.name, "cancelled" if is_cancelled else "crashed")
    return True
