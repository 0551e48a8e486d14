"""Trainings of job files, one after the other. ``main``, which ``run_ranks`` calls, is one rank of all of them.

After JOB@STEP, each rank kills itself after that step.
"""

import os
import signal
import sys
import threading
from typing import Any

from lm.distributed.process_group import RENDEZVOUS_VARIABLE
from lm.train.training_job import TrainingJob
from tests.helpers.ranks import end_rank


def main() -> None:
    meeting = os.environ[RENDEZVOUS_VARIABLE]
    for number, argument in enumerate(sys.argv[2:]):
        os.environ[RENDEZVOUS_VARIABLE] = f"{meeting}-{number}"
        job, _, last = argument.partition("@")
        options: dict[str, Any] = {"progress": lambda step, last=last: kill_after(step, int(last))} if last else {}
        with TrainingJob.read(job).prepare() as run:
            run(stop_event=threading.Event(), **options)
    end_rank()


def kill_after(step: int, last: int) -> None:
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)
