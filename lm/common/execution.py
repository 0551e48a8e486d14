"""Execution settings of this machine.

No field here enters a cache key, so that every machine can use the results of every other. Text, counts and tokens do
not depend on these fields. Trained weights may differ, because device, compile, threads, processes, parallel, attention
and activation_checkpointing change the order of floating-point additions, and so the rounding.
"""

from dataclasses import dataclass, field
from typing import Literal

from lm.common.config import PYDANTIC_CONFIG, bounded_field, validate_fields
from lm.common.errors import UserError
from lm.hardware.cpu import available_cpus

ParallelKind = Literal["none", "ddp", "zero1", "zero2", "fsdp"]
AttentionForm = Literal["auto", "sdpa", "flash", "reference"]


@dataclass(frozen=True)
class Execution:
    """How this machine does the work. A change reruns no stage, but new trainings may round in another way."""

    __pydantic_config__ = PYDANTIC_CONFIG

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
    threads: int | None = bounded_field(None, ge=1)
    """Threads for parallel stages and for torch. Default: one per CPU core."""
    device: str = "auto"
    """Torch device for training: cpu, cuda, mps, or auto for the best one present."""
    compile: bool = True
    """Speed up training with torch.compile. Skipped if it fails, or if the run is too short to repay compilation."""
    processes: int = bounded_field(1, ge=1)
    """Training processes on this machine, one per GPU. They share the batch: train.batch_size stays the total."""
    parallel: Literal["auto"] | ParallelKind = "auto"
    """What the training processes divide. ddp: the batch. zero1: also the optimizer's state. zero2: also gradients, and
    weights between steps. fsdp: also weights between the layers' passes. Each needs less memory and more traffic than
    the one before. auto: the first whose predicted memory fits. The loss curve differs by rounding only."""
    attention: AttentionForm = "auto"
    """Form of causal attention in training. auto: the form measured fastest on the device. sdpa: torch's
    scaled_dot_product_attention. flash: FlashAttention-2, on GPUs in Triton (needs the extra triton). reference: plain;
    memory grows with the square of the sequence."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more compute."""
    check_memory: bool = True
    """Refuse a training on CPUs whose predicted memory is more than 85 % of what its processes may use. false: start it
    anyway."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Experiment trackers that receive training metrics, in addition to metrics.jsonl. Each must be installed."""
    max_trainings: int = bounded_field(1, ge=0)
    """Maximum number of trainings at once on this machine, over all runs. Others wait. 0: no limit; then a sweep
    trains as many points at once as there are cores for."""
    count_memory: int = bounded_field(1024, ge=16)
    """Memory for pretoken counts, in MiB, over all threads. Counts that need more go to disk in parts."""
    download_cache: int = bounded_field(20, ge=0)
    """Disk for local copies of the files of a remote root, in GiB. They are kept between runs; the least recently used
    are deleted. Copies that were used in the last 24 hours stay, even if they need more."""
    verify: Literal["changed", "full"] = "changed"
    """How outputs are verified before use. changed: hash only files whose size, times or inode changed since their last
    check on this machine. full: hash every file."""
    log_interval: int = bounded_field(20, ge=1)
    """Training steps between log lines."""

    def __post_init__(self) -> None:
        validate_fields(self, "execution")
        if self.train_deployment and not all(self.train_deployment.partition("/")):
            raise UserError(
                f"execution.train_deployment is {self.train_deployment!r}; it must be the names of a flow and its "
                "deployment, such as pipeline/gpu-train."
            )

    @property
    def workers(self) -> int:
        """Number of threads: ``threads``, or one per CPU core."""
        return self.threads or available_cpus()
