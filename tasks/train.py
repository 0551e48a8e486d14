"""Stage ``train``: train the model on the token shards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import UserError
from lm.model.config import AdapterConfig, ModelConfig
from lm.train.config import TrainConfig
from tasks.pages import training as pages
from tasks.runtime.execution import Execution
from tasks.runtime.locks import training_slot
from tasks.runtime.output import Output, json_digest
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage
from tasks.runtime.training_process import relative_path, run_training

if TYPE_CHECKING:
    from lm.train.pretraining import Job

Weights = dict[str, dict[str, float | None]]  # of data.mix, by source
_TOKENS = "tokens.bin"


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
    mix: Weights | None = None,
    adapter: AdapterConfig | None = None,
) -> None:
    """Train the model, from the best checkpoint of ``start`` if it is given, else from new weights.

    ``mix``: see :attr:`lm.text.config.DataConfig.mix_weights`. ``adapter``: the adapter to train in place of the
    weights of ``start``. Resume from the last checkpoint of an unfinished
    attempt, if there is one.
    """

    def place(output: Output, name: str) -> str:
        return relative_path(out, local_path(output, name))

    inputs = index, train_shards, valid_shards, tokenizer, model, config, start, mix, adapter
    run_training(out, make_job(place, out.run.execution, *inputs), pages.unfinished)


def local_path(output: Output, name: str) -> Path:
    """Return the local path of the token file or of a directory of an output."""
    return (output.path if name == _TOKENS else output.directory)(name)


def make_job(
    place: Callable[[Output, str], str],
    execution: Execution,
    index: Output,
    train_shards: list[Output],
    valid_shards: list[Output],
    tokenizer: Output,
    model: ModelConfig,
    config: TrainConfig,
    start: Output | None = None,
    mix: Weights | None = None,
    adapter: AdapterConfig | None = None,
) -> "Job":
    """Return the job of a training. ``place`` returns the path or URL at which the training reads a file or directory
    of an output.

    Raises UserError if the shards were made with another tokenizer.
    """
    from lm.data.mixed_batches import read_sources
    from lm.train.pretraining import Job

    content = index.json("index.json")
    if content["tokenizer"] != tokenizer.digest:
        raise UserError("The token shards were made with another tokenizer. Refresh the encode stage.")
    train_files, valid_files = (
        index.store.map(lambda shard: place(shard, _TOKENS), shards) for shards in (train_shards, valid_shards)
    )
    digests = {"tokenizer": tokenizer.digest, "shards": index.digest, **({"mix": json_digest(mix)} if mix else {})}
    totals, separator_bytes = content["valid" if valid_files else "train"], len(content["separator"].encode())
    return Job(
        config=config,
        model=model if model.vocab_size else replace(model, vocab_size=content["vocab_size"]),
        train=train_files,
        valid=valid_files,
        tokenizer=place(tokenizer, "tokenizer"),
        # Bytes of text without separators per token, separators included. So bits per byte charge the model for the
        # separators that it predicts, and give no credit for their bytes.
        bytes_per_token=(totals["bytes"] - totals["documents"] * separator_bytes) / totals["tokens"],
        digests=digests | ({"start": start.digest} if start else {}),
        start=place(start, start.best_checkpoint) if start else "",
        out=".",
        execution=execution,
        mix=read_sources(content, mix or {}),
        adapter=adapter or AdapterConfig(),
    )
