"""The job of a profile: the job of a pretraining, whose first steps are measured.

``python -m lm.train.profile_job JOB.json`` runs the job of a file, as ``python -m lm.train`` does.
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

from lm.distributed.process_group import process_group
from lm.hardware.device import choose_device
from lm.train.directory_lock import lock_directory
from lm.train.job import Job
from lm.train.profile import profile_training


@dataclass(kw_only=True)
class ProfileJob(Job):
    """The inputs and outputs of a profile. ``out`` is a local directory."""

    profiled_steps: int
    """Steps to measure."""

    module: ClassVar[str] = "lm.train.profile_job"

    @classmethod
    def of(cls, job: Job, profiled_steps: int) -> Self:
        """Return the job that measures steps of a pretraining."""
        return cls(**{field.name: getattr(job, field.name) for field in fields(job)}, profiled_steps=profiled_steps)

    def run(
        self, progress: Callable[[int], None] = lambda step: None, stop_event: threading.Event | None = None
    ) -> dict[str, Any]:
        """Measure the steps and write the files; see :func:`lm.train.profile.profile_training`. Return the profile."""
        out, _ = self._open_out()
        with process_group(choose_device(self.execution.device)) as device, lock_directory(out):
            make_trainer = partial(self.make_trainer, out, device)
            stop_event = stop_event or threading.Event()
            return asdict(profile_training(make_trainer, device, self.profiled_steps, out, stop_event))


if __name__ == "__main__":
    from lm.train.__main__ import run_as_program

    run_as_program(ProfileJob)
