"""Detect runs whose process died, and report them to Prefect as crashed.

Prefect itself does this by heartbeats and an automation of a server that goes on. A temporary server ends with its run.
"""

import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from filelock import FileLock, Timeout
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed

from flows.prefect_support.server import has_temporary_server_ended
from flows.prefect_support.signals import find_interrupt, signal_number
from lm.files.cache_dir import cache_directory

log = logging.getLogger(__name__)


_held_locks: list[FileLock] = []


def hold_liveness_lock(run_id: str, run_count: int) -> None:
    """Mark the dead runs of this machine as crashed, and hold a lock for this run until its process ends.

    The operating system releases the lock however the process ends. The lock is never released earlier, because the
    run's last state reaches Prefect after the flow's function has returned. Each Prefect database has its own locks,
    and so has each start of a run: ``run_count`` is the number of times that Prefect has started it.
    """
    settings = get_current_settings()
    database = settings.api.url
    if not database and (connection := settings.server.database.connection_url):
        database = connection.get_secret_value()
    directory = cache_directory() / "runs" / hashlib.sha256(str(database).encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _mark_dead_runs_crashed(directory)
        lock = FileLock(directory / f"{run_id}_{run_count}.new")
        lock.acquire()
        # Rename after locking: no other run may see the file unlocked under its final name.
        Path(lock.lock_file).rename(directory / f"{run_id}_{run_count}.lock")
        _held_locks.append(lock)
    except OSError as error:
        log.warning("Prefect will not be told if this run's process dies: cannot write to %s: %s", directory, error)


def exit_if_server_is_gone(code: int) -> None:
    """End the process at once if it ran a flow and Prefect's server is gone.

    Otherwise Prefect would retry each unsent event for seconds. The next run reports this run's end.
    """
    if _held_locks:
        if get_current_settings().api.url:
            with get_client(sync_client=True) as client:
                is_gone = client.api_healthcheck() is not None
        else:
            is_gone = has_temporary_server_ended()
        if is_gone:
            print("Prefect's server does not respond; its record of this run is incomplete.", file=sys.stderr)
            sys.stdout.flush()
            os._exit(code)


def mark_task_runs_crashed(task_run_ids: Sequence[UUID], message: str) -> None:
    """Set the final state of task runs whose worker cannot do it any more."""
    with suppress(Exception), get_client(sync_client=True) as client:  # the failure of the run is what counts
        for task_run_id in task_run_ids:
            client.set_task_run_state(task_run_id, Crashed(message=message), force=True)


def mark_cancelled_after_ctrl_c(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Replace the state Crashed after Ctrl-C by Cancelled. A hook of Prefect, which takes every interrupt for a crash.

    SIGTERM and SIGHUP stay crashes: a scheduler or a lost connection ended the run, and no person decided it.
    """
    error: Any = state.data
    interrupt = find_interrupt(error)
    if interrupt and signal_number(interrupt) == signal.SIGINT:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message="Stopped by Ctrl-C."), force=True)


def _mark_dead_runs_crashed(directory: Path) -> None:
    for path in directory.glob("*_*.lock"):
        with suppress(Timeout), FileLock(path, timeout=0):  # a live run holds its lock
            try:
                run_id, run_count = path.stem.split("_")
                with get_client(sync_client=True) as client:
                    is_known = _mark_crashed(client, UUID(run_id), int(run_count))
                # An unknown run may belong to another database that was at the same address for a while: wait 30 days.
                if is_known or time.time() - path.stat().st_mtime > 30 * 24 * 3600:
                    path.unlink()
            except Exception as error:  # the state of an old run must not stop this run
                log.warning("Cannot tell Prefect that the process of run %s has ended: %s", path.stem, error)


def _mark_crashed(client: SyncPrefectClient, run_id: UUID, run_count: int) -> bool:
    """Set the final state of a run whose process has ended. Return False if Prefect does not know the run.

    A run that was started again, or that waits for its start, keeps its state.
    """
    try:
        run = client.read_flow_run(run_id)
    except ObjectNotFound:
        return False
    is_waiting = run.state and run.state.type in (StateType.SCHEDULED, StateType.PENDING, StateType.PAUSED)
    if is_waiting or run.run_count > run_count:
        return True
    message = f"Its process died; detected by run {flow_run.name}."
    for task_run in client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run_id]}}),
        task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}),
    ):
        client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
    if run.state and not run.state.is_final():
        final_state = Cancelled if run.state.type == StateType.CANCELLING else Crashed
        client.set_flow_run_state(run_id, final_state(message=message), force=True)
        log.info("Run %s is marked as %s: its process died.", run.name, final_state.__name__.lower())
    return True
