"""Trainings of job files, one after the other. ``main``, which ``run_ranks`` calls, is one rank of all of them."""

import os
import sys
import threading

from lm.distributed.process_group import RENDEZVOUS_VARIABLE
from lm.train.training_job import TrainingJob
from tests.helpers.ranks import end_rank


def main() -> None:
    meeting = os.environ[RENDEZVOUS_VARIABLE]
    for number, job in enumerate(sys.argv[2:]):
        os.environ[RENDEZVOUS_VARIABLE] = f"{meeting}-{number}"
        with TrainingJob.read(job).prepare() as run:
            run(stop_event=threading.Event())
    end_rank()
