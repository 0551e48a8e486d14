"""Where the groups of a mapped stage run: in threads of this process, or in the workers of a Dask or Ray cluster.

The libraries of the clusters are imported when they are used. A cluster runner is entered inside the flow, and is not
the flow's own task runner: otherwise Prefect would connect each task on a worker to the cluster again.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from prefect import State, Task
from prefect.settings import get_current_settings
from prefect.utilities.annotations import quote

from lm.common.errors import MachineError, UserError
from lm.text.sources import is_local_file
from tasks.runtime.execution import Execution
from tasks.runtime.run_context import RunContext

_MAX_TASK_RUNS = 256  # of a stage; more make Prefect's UI slow


def max_task_runs_on_cluster(slots: int) -> int:
    """Return the largest number of task runs of a stage on a cluster with ``slots``, two for each thread.

    Prefect needs 0.1 seconds of a worker for each task run: it loads its settings and opens two HTTP clients. Eight
    task runs a thread share the work well enough.
    """
    return min(_MAX_TASK_RUNS, max(16, 4 * slots))


class Runner:
    """Runs Prefect tasks: in the flow's own thread pool, or in the workers of a Dask or Ray cluster."""

    def __init__(self, execution: Execution, cluster: Any = None) -> None:
        """``cluster`` is Prefect's task runner for the cluster, entered."""
        self._execution, self._cluster = execution, cluster
        self._address = cluster.client.scheduler_info()["address"] if execution.runner == "dask" else ""

    def submit(self, task: "Task[..., Any]", parameters: dict[str, Any], upstream: list[State[Any]]) -> Any:
        """Start a task and return its Prefect future. ``upstream`` has the finished task runs that it reads from."""
        if self._cluster is not None:
            return self._cluster.submit(task, parameters=parameters, wait_for=upstream)
        # Prefect looks for futures in what is not quoted, while other threads add outputs to the run. It would also
        # take any object with the memory address of an earlier result for that result.
        return task.submit(**{name: quote(value) for name, value in parameters.items()}, wait_for=upstream)

    def count_slots(self) -> int:
        """Return how many tasks may be in flight: one for each thread of this process, or two for each thread or CPU
        core of the cluster. While one of these runs, the next one waits there."""
        slots = self._execution.workers
        if self._execution.runner == "dask":
            client = self._cluster.client
            if client.status != "running":
                raise ConnectionError(f"the client is {client.status}")
            slots = max(1, 2 * sum(client.nthreads().values()))
        elif self._execution.runner == "ray":
            slots = max(1, 2 * int(import_module("ray").cluster_resources().get("CPU", 1)))
        return self._execution.tasks_in_flight or slots

    def max_task_runs(self) -> int:
        """Return the largest number of task runs of a stage. A task run costs little in this process."""
        return max_task_runs_on_cluster(self.count_slots()) if self._cluster is not None else _MAX_TASK_RUNS

    def explain(self, error: BaseException) -> str:
        """Return what to tell the user about a lost cluster, or a task whose workers died; empty for other errors."""
        kind = type(error)
        if self._execution.runner == "ray" and kind.__module__.startswith("ray."):
            return f"The Ray cluster failed: {kind.__name__}: {str(error).strip().splitlines()[0]}"
        if self._execution.runner != "dask":
            return ""
        if kind.__name__ == "KilledWorker":
            return "Several workers died one after the other while they did the same group. Do they have enough memory?"
        if isinstance(error, (OSError, TimeoutError)) or kind.__name__ in ("CancelledError", "FutureCancelledError"):
            return f"The Dask scheduler at {self._address} is lost. Start it again."
        return ""


@contextmanager
def open_runner(run: RunContext, sources: Sequence[str]) -> Iterator[Runner]:
    """Connect to the cluster of ``execution.address``, or start a cluster on this machine.

    Raises UserError if the library is missing, the cluster does not answer, or its workers could not read the root or
    the ``sources``, which are paths or URLs.
    """
    execution = run.execution
    if execution.runner == "threads":
        yield Runner(execution)
        return
    _check_reachable(run, sources)
    runners = {"dask": ("prefect_dask", "DaskTaskRunner"), "ray": ("prefect_ray", "RayTaskRunner")}
    module, name = runners[execution.runner]
    try:
        task_runner = getattr(import_module(module), name)
    except ImportError as error:
        raise UserError(
            f"execution.runner {execution.runner} needs an extra: pip install 'textmill[{execution.runner}]' ({error})."
        ) from None
    # Without an address, Prefect's task runner starts a cluster on this machine.
    options: dict[str, Any] = {"address": execution.address or None}
    if execution.runner == "dask":
        for connection in ("distributed.client", "distributed.batched"):  # they print tracebacks of lost connections
            logging.getLogger(connection).setLevel(logging.CRITICAL)
        local = {"n_workers": execution.workers, "threads_per_worker": 1, "dashboard_address": None}
        options["cluster_kwargs"] = {} if execution.address else local
    else:
        local = {"num_cpus": execution.workers, "include_dashboard": False}
        # The log of the workers goes to Prefect.
        options["init_kwargs"] = {"log_to_driver": False} | ({} if execution.address else local)
    with task_runner(**options) as entered:
        try:
            runner = Runner(execution, entered)
            runner.count_slots()
        except (OSError, ValueError) as error:  # ValueError: the address is not valid
            raise MachineError(f"The cluster at {execution.address} does not answer: {error}.") from None
        yield runner


def _check_reachable(run: RunContext, sources: Sequence[str]) -> None:
    """Raise UserError if workers on other machines could not work for this run."""
    execution = run.execution
    if execution.address and not execution.shared_root:
        if run.store.is_local:
            raise UserError(
                f"The workers at {execution.address} may not see {run.store.base}, a directory of this machine. Use a "
                "root on an object store, such as s3://bucket/root. If all machines share that directory, set "
                "execution.shared_root."
            )
        if local := [source for source in sources if is_local_file(source)]:
            raise UserError(
                f"The workers at {execution.address} may not see {local[0]}, a file of this machine. Copy it to an "
                "object store. If all machines have the same files there, set execution.shared_root."
            )
    if not get_current_settings().api.url:
        raise UserError(
            f"execution.runner {run.execution.runner} needs a Prefect server that the workers can reach. Start one "
            "with prefect server start --host 0.0.0.0, and set PREFECT_API_URL here."
        )
