"""Measure the first steps of a training. Not a stage: measurements are never cached."""

import json
import logging
from pathlib import Path
from typing import Any

from lm.model.config import ModelConfig
from lm.train.config import TrainConfig
from tasks.runtime.context import RunContext
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.train import make_job

log = logging.getLogger(__name__)


def profile(
    out: Path,
    run: RunContext,
    steps: int,
    index: Output,
    train_shards: list[Output],
    valid_shards: list[Output],
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
    start: Output | None = None,
) -> dict[str, Any]:
    """Measure ``steps`` steps of the training with these inputs, in the processes of ``run.execution``.

    Writes the files of :func:`lm.train.profile.profile_training` to ``out``, an existing directory; returns
    ``profile.json``.
    """
    from lm.distributed.launch import run_processes
    from lm.train.profile import PROFILE_FILE, ProfileJob

    train_files, valid_files = (
        run.store.map(lambda shard: str(shard.path("tokens.bin").resolve()), shards)
        for shards in (train_shards, valid_shards)
    )
    tokenizer_path = str(tokenizer.directory("tokenizer").resolve())
    start_path = str(start.directory(start.json("training.json")["best"]).resolve()) if start else ""
    job = make_job(
        index, tokenizer, model, config, train_files, valid_files, tokenizer_path, run.execution, start, start_path
    )
    job = ProfileJob.of(job, steps)
    path = out / "job.json"
    job.write(path)
    with training_slot(run):
        log.info("Measuring %d steps.", steps)
        if job.execution.processes > 1:
            run_processes("lm.train", path, job.execution.processes, lambda: None, run.stopping)
        else:
            with job.read(path).prepare() as measure:
                measure(stop_event=run.stopping)
    content: dict[str, Any] = json.loads((out / PROFILE_FILE).read_text(encoding="utf-8"))
    return content
