"""Stage ``train``: token shards in, checkpoints out."""

import json
import os
from dataclasses import replace
from functools import partial
from typing import Any

from lm.errors import UserError
from lm.model import ModelConfig
from lm.processes import run_processes
from lm.recipe import TrainConfig
from lm.train import Job
from lm.trainer import Interrupted
from tasks import pages
from tasks.machine import training_turn
from tasks.progress import show_progress
from tasks.stage import Draft, Output, Stopped, stage


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
        [os.path.relpath(shard.path("tokens.bin"), out.directory) for shard in shards]
        for shards in (train_shards, valid_shards)
    )
    job = Job(
        config,
        model if model.vocab_size else replace(model, vocab_size=content["vocab_size"]),
        train_files,
        valid_files,
        os.path.relpath(directory, out.directory),
        _bytes_per_token(measured, content["separator"]),
        {"tokenizer": tokenizer.digest, "shards": index.digest},
        ".",
        [os.path.relpath(previous, out.directory) for previous in out.unfinished],
        out.execution,
    )
    path = out.directory / "job.json"
    job.write(path)
    so_far = partial(pages.training_so_far, out.directory)
    with show_progress("train", config.steps, "step", so_far) as progress:
        try:
            if out.execution.processes > 1:
                run_processes(path, out.execution.processes, progress, out.stopping, out.directory / "metrics.jsonl")
            else:
                Job.read(path).run(progress, out.stopping)
        except Interrupted as stop:
            raise Stopped(str(stop)) from None
    out.figures = json.loads((out.directory / "training.json").read_text(encoding="utf-8"))
    board = [str(file.relative_to(out.directory)) for file in out.directory.glob("tensorboard/*")]
    out.records = ["metrics.jsonl", "loss.png", "job.json", *board]


def _bytes_per_token(split: dict[str, Any], separator: str) -> float:
    """Bytes of text without the separators, over all tokens: so bits per byte charge the model for every separator it
    must foresee and do not credit it with their bytes."""
    return float((split["bytes"] - split["documents"] * len(separator.encode())) / split["tokens"])
