"""Execution settings of a run: how this machine trains, and where and how the tasks of the run work."""

from dataclasses import dataclass
from typing import Any, Literal

import lm.common.execution
from lm.common.config import bounded_field
from lm.common.errors import UserError
from lm.hardware.cpu import available_cpus


@dataclass(frozen=True)
class Execution(lm.common.execution.Execution):
    """How this machine does the work. A change reruns no stage, but new trainings may round in another way."""

    runner: Literal["threads", "dask", "ray"] = "threads"
    """Where the parts of ingest, chunk, count and encode run, and the trainings of a sweep. threads: in this process.
    dask, ray: in the workers of a cluster, see docs/cluster.md."""
    address: str = ""
    """Address of a running cluster, such as tcp://scheduler:8786 for Dask or ray://head:10001 for Ray. Default: a
    cluster on this machine, for the time of the run."""
    shared_root: bool = False
    """Whether all machines of the cluster see the root under the same path. Needed for a root that is a directory."""
    threads_per_task: int = bounded_field(1, ge=1)
    """Threads of a task in a worker of a cluster. The worker's own number of threads is how many tasks it runs at once.
    """
    tasks_in_flight: int | None = bounded_field(None, ge=1)
    """Tasks that run or wait in workers at the same time. Default: threads, or twice the threads of all workers."""
    train_deployment: str = ""
    """Prefect deployment that trains the model, such as pipeline/gpu-train: its work pool may have machines with GPUs.
    Default: the run trains it itself."""
    max_trainings: int = bounded_field(1, ge=0)
    """Maximum number of trainings at once on this machine, over all runs. Others wait. 0: no limit; then a sweep
    trains as many points at once as there are cores for."""
    count_memory: int = bounded_field(1024, ge=16)
    """Memory for pretoken counts, in MiB, over all threads. Counts that need more go to disk in parts."""
    verify: Literal["changed", "full"] = "changed"
    """How outputs are verified before use. changed: hash only files whose size, times or inode changed since their last
    check on this machine. full: hash every file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_deployment and not all(self.train_deployment.partition("/")):
            raise UserError(
                f"execution.train_deployment is {self.train_deployment!r}; it must be the names of a flow and its "
                "deployment, such as pipeline/gpu-train."
            )

    @property
    def workers(self) -> int:
        """Number of threads: ``threads``, or one per CPU core."""
        return self.threads or available_cpus()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        """Describe the inherited fields in Prefect's form too: pydantic reads only the docstrings of a class itself."""
        from pydantic import TypeAdapter  # slow to import

        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, inherited in TypeAdapter(lm.common.execution.Execution).json_schema()["properties"].items():
            properties[name]["description"] = inherited["description"]
        return schema
