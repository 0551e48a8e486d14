"""The training of a stage: resumed from unfinished attempts, in one process or several."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import Stopped, UserError
from tasks.runtime.locks import is_locked
from tasks.runtime.output import BASE_FILE, Output
from tasks.runtime.run_context import Attempt, show_progress
from tasks.runtime.schemas import ATTEMPT_NAME

if TYPE_CHECKING:
    from lm.train.training_job import TrainingJob


def run_training(out: Attempt, job: "TrainingJob", unfinished_page: Callable[[Path], str]) -> None:
    """Run a job whose ``out`` is ".", and set the figures and records of the attempt.

    Resumes from the last checkpoint of an unfinished attempt that read the same files. ``unfinished_page`` returns the
    Markdown of a training that is still running, from its directory.
    """
    from lm.checkpoint.training_checkpoint import ROW_FILES
    from lm.distributed.launch import run_processes
    from lm.train.graceful_stop import stop_on_signals
    from lm.train.tracking import step_reporter

    stopping = out.run.stopping
    if not out.run.store.is_local:
        job.mirror = out.run.store.url(*out.place)
        _fetch_checkpoints(out)
    # A resumed training copies the rows of these files, which have no digests of their own.
    intact = [previous for previous in out.unfinished if not {previous / name for name in ROW_FILES} & out.damaged]
    job.previous = [relative_path(out, previous) for previous in intact if has_same_inputs(previous, job)]
    path = out.directory / "job.json"
    job.write(path)
    page = partial(unfinished_page, out.directory)
    try:
        with (
            show_progress(out.place[0], job.config.steps, "step", out.run.label, page) as progress,
            stop_on_signals(stopping) as signals,
        ):
            # torch's random generator and number of threads belong to a process: trainings in threads need their own.
            if job.execution.processes > 1 or threading.current_thread() is not threading.main_thread():
                report_step = step_reporter(out.directory / "metrics.jsonl", progress)
                run_processes("lm.train", path, job.execution.processes, report_step, stopping)
            else:
                with job.read(path).prepare() as run:
                    run(progress, stopping)
    except Stopped:
        if not signals:
            raise
    if signals:  # the checkpoint is saved: now let the signal have its usual effect, also after the last step
        signal.raise_signal(signals[0])
        raise Stopped("The run is being stopped.")
    out.figures = out.read_json("training.json")
    # Older checkpoints are no content: a training that skipped a damaged one has the same result.
    results = {out.figures["best"], out.figures["last"]}
    older = [file for file in out.directory.glob("step-*/*") if file.parent.name not in results]
    maybe = [out.directory / name for name in ("rollouts.jsonl", "reference.jsonl", BASE_FILE)]
    records = [*out.directory.glob("tensorboard/*"), *older, *(path for path in maybe if path.exists())]
    out.records = [
        "metrics.jsonl",
        "loss.png",
        "job.json",
        *(str(file.relative_to(out.directory)) for file in records),
    ]


def relative_path(out: Attempt, path: Path) -> str:
    """Return a path relative to the job, so that a moved root keeps working."""
    return os.path.relpath(path.resolve(), out.directory.resolve())


def best_checkpoint(out: Attempt, model: Output) -> str:
    """Return the path of the best checkpoint of a training, relative to the job."""
    return relative_path(out, model.directory(model.best_checkpoint))


def has_same_inputs(previous: Path, job: "TrainingJob") -> bool:
    """Return whether an earlier attempt read the same files as ``job``. If a file was made again since, it had been
    damaged, and so the checkpoints may be wrong."""
    try:
        if is_locked(previous / "job.json", is_required=False):  # a program is running there
            return False
        previous_job = job.read(previous / "job.json")
    except (UserError, OSError):
        return False

    def input_files(job: "TrainingJob") -> list[tuple[str, ...]]:  # downloaded files keep only the end of their path
        return [Path(name).parts[-4:] for name in job.input_files()]

    return input_files(previous_job) == input_files(job)


def _fetch_checkpoints(out: Attempt) -> None:
    """Fetch the checkpoints that unfinished trainings on other machines copied to the root, newest training first."""
    from lm.checkpoint.mirror import CheckpointMirror

    store, (stage, key, attempt) = out.run.store, out.place
    for name in store.list_names(stage, key):
        if ATTEMPT_NAME.fullmatch(name) and out.newer_than < name != attempt:
            CheckpointMirror(store.local_directory(stage, key, name), store.url(stage, key, name)).download()
    attempts = store.attempt_directories(stage, key, newer_than=out.newer_than)
    out.unfinished = [path for path in attempts if path != out.directory]
