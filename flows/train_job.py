"""Write the job of a training for machines that have no Prefect."""

import json
import shlex
from dataclasses import asdict

from flows.config import PipelineConfig
from flows.pipeline import find_cached_training
from lm.common.errors import UserError
from tasks.runs.run_record import make_run
from tasks.runtime.locks import training_heartbeat
from tasks.runtime.stage import new_attempt_name, open_input
from tasks.train import make_job, train


def write_train_job(config: PipelineConfig, root: str) -> str:
    """Write ``job.json`` as an unfinished attempt of the stage train. Return its path or URL.

    A later run of the pipeline resumes from the checkpoints beside it, and so finishes the stage. Raises UserError if
    the stages before are not finished, or if the training is.
    """
    run = make_run(config, root, "train-job")
    training = find_cached_training(config, run)
    if training is None:
        command = f"textmill run --root {shlex.quote(root)} --until encode"
        raise UserError(f"The stages before train are not finished. First: {command}.")
    arguments = train.bind(*training.arguments)
    ((ref, is_cached),) = train.look_up(run, [arguments])
    if is_cached:
        raise UserError(f"The training of this configuration is finished under {root}.")
    attempt = new_attempt_name()
    place = (*ref, attempt)
    inputs = {name: open_input(value, run.store) for name, value in arguments.items()}
    job = make_job(lambda output, name: output.file_url(name), config.execution, **inputs)
    for shard in (*inputs["train_shards"], *inputs["valid_shards"]):
        (tokens,) = (file for file in shard.manifest["files"] if file["path"] == "tokens.bin")
        job.checksums[shard.file_url("tokens.bin")] = tokens["sha256"]
    job.heartbeat = training_heartbeat(run.store, attempt)
    run.store.write_text(json.dumps(asdict(job), indent=1), *place, "job.json")
    return run.store.url(*place, "job.json")
