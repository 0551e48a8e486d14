"""Stage ``train``: train the model on the token shards."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.errors import Stopped, UserError
from lm.common.runtime import Execution
from lm.model.config import ModelConfig
from lm.train.config import TrainConfig
from tasks.pages import stages as pages
from tasks.runtime.context import Attempt
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.progress import show_progress
from tasks.runtime.root_lock import is_locked
from tasks.runtime.schemas import ATTEMPT_NAME
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    from lm.train.job import Job

_LOGS = ("metrics.jsonl", "samples.jsonl")  # a resumed training copies their rows, which have no digests of their own


@stage("train", page=pages.train, slot=lambda execution: training_slot(execution.max_trainings), is_resumable=True)
def train(
    out: Attempt,
    index: Output,
    train_shards: list[Output],
    valid_shards: list[Output],
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
) -> None:
    """Train the model. Resume from the last checkpoint of an unfinished attempt, if there is one."""
    from lm.distributed.launch import run_processes
    from lm.train.graceful_stop import stop_on_signals
    from lm.train.job import Job
    from lm.train.metrics_file import step_reporter

    stopping = out.run.stopping
    train_files, valid_files = (
        out.run.store.map(lambda shard: _relative_path(out, shard.path("tokens.bin")), shards)
        for shards in (train_shards, valid_shards)
    )
    tokenizer_path = _relative_path(out, tokenizer.directory("tokenizer"))
    job = make_job(index, tokenizer, model, config, train_files, valid_files, tokenizer_path, out.run.execution)
    if not out.run.store.is_local:
        job.mirror = out.url
        _fetch_checkpoints(out)
    intact = [previous for previous in out.unfinished if not {previous / log for log in _LOGS} & out.damaged]
    job.previous = [_relative_path(out, previous) for previous in intact if has_same_inputs(previous, job)]
    path = out.directory / "job.json"
    job.write(path)
    page = partial(pages.unfinished_training, out.directory)
    try:
        with (
            show_progress("train", config.steps, "step", out.run.label, page) as progress,
            stop_on_signals(stopping) as signals,
        ):
            if job.execution.processes > 1:
                report_step = step_reporter(out.directory / "metrics.jsonl", progress)
                run_processes(path, job.execution.processes, report_step, stopping)
            else:
                Job.read(path).run(progress, stopping)
    except Stopped:
        if signals:  # the checkpoint is saved: now let the signal have its usual effect
            signal.raise_signal(signals[0])
        raise
    out.figures = json.loads((out.directory / "training.json").read_text(encoding="utf-8"))
    # Older checkpoints are no content: a training that skipped a damaged one has the same result.
    results = {out.figures["best"], out.figures["last"]}
    older = [file for file in out.directory.glob("step-*/*") if file.parent.name not in results]
    records = [*out.directory.glob("tensorboard/*"), *older]
    out.records = ["metrics.jsonl", "loss.png", "job.json", *(str(file.relative_to(out.directory)) for file in records)]


def make_job(
    index: Output,
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
    train_files: list[str],
    valid_files: list[str],
    tokenizer_path: str,
    execution: Execution,
) -> "Job":
    """Return the job of a training. The paths, or URLs, are those where the training reads its inputs.

    Raises UserError if the shards were made with another tokenizer.
    """
    from lm.train.job import Job

    content = index.json("index.json")
    if content["tokenizer"] != tokenizer.digest:
        raise UserError("The token shards were made with another tokenizer. Refresh the encode stage.")
    return Job(
        config,
        model if model.vocab_size else replace(model, vocab_size=content["vocab_size"]),
        train_files,
        valid_files,
        tokenizer_path,
        bytes_per_token=_bytes_per_token(content["valid" if valid_files else "train"], content["separator"]),
        digests={"tokenizer": tokenizer.digest, "shards": index.digest},
        out=".",
        execution=execution,
    )


def _fetch_checkpoints(out: Attempt) -> None:
    """Fetch the checkpoints that unfinished trainings on other machines copied to the root, newest training first."""
    from lm.checkpoint.mirror import CheckpointMirror

    store, (*_, stage, key, attempt) = out.run.store, out.directory.parts
    if stage in out.run.refresh:
        return
    for name in store.list_names(stage, key):
        if ATTEMPT_NAME.fullmatch(name) and name != attempt:
            CheckpointMirror(store.local_directory(stage, key, name), store.url(stage, key, name)).download()
    out.unfinished = [path for path in store.attempt_directories(stage, key) if path != out.directory]


def _relative_path(out: Attempt, path: Path) -> str:
    """Return a path relative to the job, so that a moved root keeps working."""
    return os.path.relpath(path.resolve(), out.directory.resolve())


def has_same_inputs(previous: Path, job: "Job") -> bool:
    """Return whether an earlier attempt read the same files as ``job``. If a file was made again since, it had been
    damaged, and so the checkpoints may be wrong."""
    from lm.train.job import Job

    try:
        if is_locked(previous / "job.json"):  # lm.train is running there
            return False
        previous_job = Job.read(previous / "job.json")
    except (UserError, OSError):
        return False

    def input_files(job: "Job") -> list[tuple[str, ...]]:  # downloaded files keep only the end of their path
        return [Path(name).parts[-4:] for name in (*job.train, *job.valid, job.tokenizer)]

    return input_files(previous_job) == input_files(job)


def _bytes_per_token(totals: dict[str, Any], separator: str) -> float:
    """Return the bytes of text without separators per token, separators included. So bits per byte charge the model for
    the separators that it predicts, and give no credit for their bytes."""
    return float((totals["bytes"] - totals["documents"] * len(separator.encode())) / totals["tokens"])
