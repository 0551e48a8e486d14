"""How work is carried out on this machine: nothing here decides a result, so nothing here is in a cache key."""

import os
from dataclasses import dataclass

from lm.errors import UserError


@dataclass(frozen=True)
class Execution:
    """How the work runs on this machine. Changing these reruns nothing."""

    __pydantic_config__ = {"use_attribute_docstrings": True}

    threads: int | None = None
    """Threads for parallel stages and for torch. Default: one a core."""
    device: str = "auto"
    """Where the model trains: cpu, cuda, mps, or auto for the best there is."""
    compile: bool = True
    """Whether torch.compile speeds up training, where it works and the run is long enough to earn its start-up."""
    log_interval: int = 20
    """Training steps between two lines in the log."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(f"execution.threads is {self.threads}; it must be at least 1, or left out.")
        if self.log_interval < 1:
            raise UserError(f"execution.log_interval is {self.log_interval}; it must be at least 1.")

    @property
    def workers(self) -> int:
        """The number of threads to use."""
        return self.threads or os.cpu_count() or 1
