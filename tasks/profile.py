"""Measure the first steps of a training. Not a stage: measurements are never cached."""

import json
import logging
from pathlib import Path
from typing import Any

from tasks.runtime.locks import training_slot
from tasks.runtime.run_context import RunContext
from tasks.train import local_path, make_job

log = logging.getLogger(__name__)


def profile(out: Path, run: RunContext, steps: int, **inputs: Any) -> dict[str, Any]:
    """Measure ``steps`` steps of the training with ``inputs``, those of the stage train, in the processes of
    ``run.execution``.

    Writes the files of :func:`lm.train.profile.profile_training` to ``out``, an existing directory; returns
    ``profile.json``.
    """
    from lm.distributed.launch import run_processes
    from lm.train.profile import PROFILE_FILE, ProfileJob

    job = make_job(lambda output, name: str(local_path(output, name).resolve()), run.execution, **inputs)
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
