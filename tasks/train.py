"""Stage ``train``: token shards in, checkpoints out."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.model import ModelConfig
from lm.processes import run_processes
from lm.recipe import TrainConfig
from lm.train import Job, stopped_by_signals
from lm.trainer import Interrupted
from tasks import pages
from tasks.machine import training_turn
from tasks.output import Output
from tasks.progress import show_progress
from tasks.stage import Draft, Stopped, stage

_LOGS = ("metrics.jsonl", "samples.jsonl")  # a training that goes on takes over their rows, which nothing else checks


@stage("train", page=pages.train, turn=lambda execution: training_turn(execution.max_trainings))
def train(
    out: Draft,
    index: Output,
    train_shards: list[Output],
    valid_shards: list[Output],
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
) -> None:
    """Train the model, going on from the last checkpoint of an attempt that did not finish."""
    content = index.json("index.json")
    if content["tokenizer"] != tokenizer.digest:
        raise UserError("The token shards were made with another tokenizer; refresh the encode stage.")
    measured = content["valid" if valid_shards else "train"]
    directory = tokenizer.directory("tokenizer")
    train_files, valid_files = (
        [_beside(out, shard.path("tokens.bin")) for shard in shards] for shards in (train_shards, valid_shards)
    )
    job = Job(
        config,
        model if model.vocab_size else replace(model, vocab_size=content["vocab_size"]),
        train_files,
        valid_files,
        _beside(out, directory),
        _bytes_per_token(measured, content["separator"]),
        {"tokenizer": tokenizer.digest, "shards": index.digest},
        ".",
        execution=out.execution,
    )
    whole = (previous for previous in out.unfinished if not {previous / log for log in _LOGS} & out.damaged)
    job.previous = [_beside(out, previous) for previous in whole if reads_the_same(previous, job)]
    path = out.directory / "job.json"
    job.write(path)
    so_far = partial(pages.training_so_far, out.directory)
    try:
        with show_progress("train", config.steps, "step", so_far) as tell, stopped_by_signals(out.stopping) as signals:
            if out.execution.processes > 1:
                run_processes(path, out.execution.processes, tell, out.stopping, out.directory / "metrics.jsonl")
            else:
                Job.read(path).run(tell, out.stopping)
    except Interrupted as stop:
        if signals:  # which now, all saved, does what it always does
            signal.raise_signal(signals[0])
        raise Stopped(str(stop)) from None
    out.figures = json.loads((out.directory / "training.json").read_text(encoding="utf-8"))
    board = [str(file.relative_to(out.directory)) for file in out.directory.glob("tensorboard/*")]
    # A training that goes on from the last checkpoint, as older ones are damaged, is not another for that.
    wanted = {out.figures["best"], out.figures["last"]}
    older = [file for file in out.directory.glob("step-*/*") if file.parent.name not in wanted]
    older_names = [str(file.relative_to(out.directory)) for file in older]
    out.records = ["metrics.jsonl", "loss.png", "job.json", *board, *older_names]


def _beside(out: Draft, path: Path) -> str:
    """A path relative to the job, so that a root that is moved takes its jobs along."""
    return os.path.relpath(path.resolve(), out.directory.resolve())


def reads_the_same(previous: Path, job: Job) -> bool:
    """Whether an earlier attempt read the very files of ``job``. Those that were made anew since were damaged, and so
    may its checkpoints be."""
    try:
        earlier = Job.read(previous / "job.json")
    except UserError:
        return False
    # In files that are fetched to read them, only the end of a path stays.
    files = [[Path(name).parts[-4:] for name in (*one.train, *one.valid, one.tokenizer)] for one in (earlier, job)]
    return files[0] == files[1]


def _bytes_per_token(split: dict[str, Any], separator: str) -> float:
    """Bytes of text without the separators, over all tokens: so bits per byte charge the model for every separator it
    must foresee and do not credit it with their bytes."""
    return float((split["bytes"] - split["documents"] * len(separator.encode())) / split["tokens"])
