"""The last states of runs, where Prefect would not record them or would record others."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed

from flows.prefect_support.server import has_temporary_server_ended
from flows.prefect_support.signals import find_interrupt, signal_number

_runs: list[str] = []
"""The flow runs of this process."""


def note_start(flow_run_id: str, run_count: int) -> None:
    """Note that a flow run starts in this process. After an earlier start of it, whose process was killed, set the
    final states of its task runs."""
    _runs.append(flow_run_id)
    if run_count < 2:
        return
    with suppress(Exception), get_client(sync_client=True) as client:  # old task runs must not stop this run
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}}),
            task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}),
        )
        mark_task_runs_crashed([task_run.id for task_run in task_runs], "The process of the run was killed.")


def exit_if_server_is_gone(code: int) -> None:
    """End the process at once if it ran a flow and Prefect's server is gone.

    Otherwise Prefect would retry each unsent event for seconds.
    """
    if not _runs:
        return
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
