"""The Prefect task that makes outputs of a stage, in this process or in a worker of a cluster.

Its function is pickled by reference: a worker imports it, and the stages, from its own installation of textmill.
"""

import functools
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from flows.prefect_support.logging import send_logs_to_prefect
from lm.common.errors import MachineError
from tasks.runtime.context import RunContext
from tasks.runtime.lease import stop_without_lease
from tasks.runtime.output import Ref
from tasks.runtime.stage import Stage


def make_outputs(
    stage: Stage, calls: Sequence[dict[str, Any]], run: RunContext, title: str, code: dict[str, Any]
) -> Any:
    """Make the output of each call unless it is cached. Return the Refs as dicts.

    A worker of a cluster works on ``execution.threads_per_task`` calls at a time. It stops if the lease of the run is
    lost. ``title`` names the task run. ``code`` has the driver's :meth:`Stage.code_ingredients`. Raises MachineError if
    the worker has another version of textmill or of a library.
    """
    if run.is_worker:
        send_logs_to_prefect()
        _check_same_code(stage, code)
    with stop_without_lease(run) if run.is_worker else nullcontext():
        threads = min(len(calls), run.execution.threads_per_task)
        if threads > 1:
            contexts = [copy_context() for _ in calls]  # logging needs the context of the Prefect run
            with ThreadPoolExecutor(threads) as pool:
                results = list(
                    pool.map(lambda context, call: context.run(stage.materialize, run, call), contexts, calls)
                )
        else:
            results = [stage.materialize(run, call) for call in calls]
    refs = [ref._asdict() for ref, _ in results]
    # Only the manifests decide what is cached. The name of Prefect's state is for people.
    is_cached = all(is_cached for _, is_cached in results)
    return Completed(name="Cached", data=refs) if is_cached else refs


@functools.cache
def stage_task(name: str) -> "Task[..., Any]":
    """Return the Prefect task :func:`make_outputs` with the name of a stage."""
    return Task(make_outputs, name=name, task_run_name="{title}", cache_policy=NO_CACHE, persist_result=False)


def read_refs(result: list[dict[str, str]]) -> list[Ref]:
    """Return the Refs in the result of :func:`make_outputs`."""
    return [Ref(**ref) for ref in result]


def _check_same_code(stage: Stage, code: dict[str, Any]) -> None:
    own = stage.code_ingredients()
    if different := sorted(name for name in code if code[name] != own.get(name)):
        details = "; ".join(f"{name}: {own.get(name)} on the worker, {code[name]} in the driver" for name in different)
        raise MachineError(
            f"The worker on {platform.node()} has other code than the driver ({details}). Install the same version "
            "of textmill and of its libraries on all workers."
        )
