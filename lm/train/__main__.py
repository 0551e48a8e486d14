"""Run the training of a job file, without the pipeline.

``python -m lm.train JOB.json`` trains on one device, ``torchrun --nproc-per-node N -m lm.train JOB.json`` on N. The
stages that train a model write the job file, and ``textmill train-job`` one of URLs, for ``torchrun --nnodes``. Ctrl-C,
SIGTERM and SIGHUP, as of a closed terminal, finish the step and save; the same command resumes.

Exit codes of ``python -m lm.train``: 0 when the training is finished, 2 for a user's mistake, 65 when the training
diverged, 74 when a disk or a network failed, 75 when a signal stopped the training and it was saved. A second signal
ends the process at once without saving. ``torchrun`` replaces the exit codes of its processes: it exits with 1 and a
traceback after a signal (SignalException), or if a process ends with a code other than 0 (ChildFailedError). It kills
its processes 30 seconds after the signal; raise ``--shutdown-timeout`` if a step and a checkpoint take longer.
"""

import argparse
import logging
import os
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

from lm.common.errors import Stopped, UserError
from lm.distributed.launch import (
    ERROR_EXIT_CODES,
    FINAL_MESSAGE_PREFIX,
    INTERRUPTED_EXIT_CODE,
    PARENT_PIPE_VARIABLE,
)
from lm.files.atomic_dir import hold_shared_lock
from lm.train.graceful_stop import stop_on_signals, stop_with_parent
from lm.train.training_job import TrainingJob


def main(arguments: list[str] | None = None) -> int:
    """Run the job of a file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lm.train", description=__doc__)
    parser.add_argument("job", help="JSON file that a training stage or textmill train-job wrote, or its URL")
    options = parser.parse_args(arguments)
    stop_event = threading.Event()
    if os.environ.get(PARENT_PIPE_VARIABLE):
        threading.Thread(target=stop_with_parent, args=(stop_event,), daemon=True).start()
    is_rank0 = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_rank0 else logging.ERROR, format="%(message)s")
    try:
        # Under torchrun a process may receive a signal twice: from the cluster and from torchrun, which passes it on.
        with stop_on_signals(stop_event, ignore_repeats="TORCHELASTIC_RUN_ID" in os.environ):
            job = TrainingJob.read(options.job)
            lock = nullcontext() if "://" in options.job else hold_shared_lock(Path(options.job))
            with lock, job.prepare() as run:  # textmill gc does not delete a locked job
                run(stop_event=stop_event)
    except (UserError, Stopped) as error:
        with suppress(OSError):  # the terminal may be closed
            print(f"{FINAL_MESSAGE_PREFIX}{error}", file=sys.stderr)
        codes = (code for code, kind in ERROR_EXIT_CODES.items() if isinstance(error, kind))
        return next(codes, INTERRUPTED_EXIT_CODE)
    finally:
        _flush_output()
    return 0


def _flush_output() -> None:
    """Write what is buffered. If the terminal is closed, drop it: else Python would end with the exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_as_program() -> None:
    """Run the job that the command line names, and end the process."""
    exit_code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A thread of torch's process group may abort the process while the interpreter ends (pytorch #190489), although
        # all is saved. Seen in 1 of 120 processes.
        logging.shutdown()
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    run_as_program()
