"""How work is carried out on this machine: nothing here decides a result, so nothing here is in a cache key."""

import os
from dataclasses import dataclass, field
from typing import Literal

from lm.bounds import FORM, bounded, check_bounds


@dataclass(frozen=True)
class Execution:
    """How the work runs on this machine. Changing these reruns nothing."""

    __pydantic_config__ = FORM

    threads: int | None = bounded(None, ge=1)
    """Threads for parallel stages and for torch. Default: one a core."""
    device: str = "auto"
    """Where the model trains: cpu, cuda, mps, or auto for the best there is."""
    compile: bool = True
    """Whether torch.compile speeds up training, where it works and the run is long enough to earn its start-up."""
    processes: int = bounded(1, ge=1)
    """Processes that a training is divided among, on this machine: one a GPU. The batch is divided, not multiplied."""
    recompute: bool = False
    """Whether the backward pass computes activations again instead of keeping them: less memory, a third more work."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Trackers that a training's figures go to besides metrics.jsonl; each must be installed."""
    max_trainings: int = bounded(1, ge=0)
    """Trainings that may run on this machine at once, of all runs; the others wait. 0: no limit."""
    count_memory: int = bounded(1024, ge=16)
    """Megabytes that the counts of pretokens may take in all threads; more go to disk on the way."""
    log_interval: int = bounded(20, ge=1)
    """Training steps between two lines in the log."""

    def __post_init__(self) -> None:
        check_bounds(self, "execution")

    @property
    def workers(self) -> int:
        """The number of threads to use."""
        return self.threads or os.cpu_count() or 1
