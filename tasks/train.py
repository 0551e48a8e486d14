"""Stage ``train``: train the model on the token shards."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.train.config import TrainConfig
from tasks.pages import stages as pages
from tasks.runtime.context import Attempt
from tasks.runtime.execution import Execution
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.stage import stage
from tasks.runtime.training import best_checkpoint, relative_path, run_training

if TYPE_CHECKING:
    from lm.train.pretraining import Job


@stage("train", page=pages.train, slot=training_slot, is_resumable=True)
def train(
    out: Attempt,
    index: Output,
    train_shards: list[Output],
    valid_shards: list[Output],
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
    start: Output | None = None,
) -> None:
    """Train the model, from the best checkpoint of ``start`` if it is given, else from new weights.

    Resume from the last checkpoint of an unfinished attempt, if there is one.
    """
    train_files, valid_files = (
        out.run.store.map(lambda shard: relative_path(out, shard.path("tokens.bin")), shards)
        for shards in (train_shards, valid_shards)
    )
    tokenizer_path = relative_path(out, tokenizer.directory("tokenizer"))
    start_path = best_checkpoint(out, start) if start else ""
    job = make_job(
        index, tokenizer, model, config, train_files, valid_files, tokenizer_path, out.run.execution, start, start_path
    )
    run_training(out, job, pages.unfinished_training)


def make_job(
    index: Output,
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
    train_files: list[str],
    valid_files: list[str],
    tokenizer_path: str,
    execution: Execution,
    start: Output | None = None,
    start_path: str = "",
) -> "Job":
    """Return the job of a training. The paths, or URLs, are those where the training reads its inputs; ``start_path``
    is that of a checkpoint of ``start``.

    Raises UserError if the shards were made with another tokenizer.
    """
    from lm.train.pretraining import Job

    content = index.json("index.json")
    if content["tokenizer"] != tokenizer.digest:
        raise UserError("The token shards were made with another tokenizer. Refresh the encode stage.")
    return Job(
        config=config,
        model=model if model.vocab_size else replace(model, vocab_size=content["vocab_size"]),
        train=train_files,
        valid=valid_files,
        tokenizer=tokenizer_path,
        bytes_per_token=_bytes_per_token(content["valid" if valid_files else "train"], content["separator"]),
        digests={
            "tokenizer": tokenizer.digest,
            "shards": index.digest,
            **({"start": start.digest} if start else {}),
        },
        start=start_path,
        out=".",
        execution=execution,
    )


def _bytes_per_token(totals: dict[str, Any], separator: str) -> float:
    """Return the bytes of text without separators per token, separators included. So bits per byte charge the model for
    the separators that it predicts, and give no credit for their bytes."""
    return float((totals["bytes"] - totals["documents"] * len(separator.encode())) / totals["tokens"])
