"""Stage ``train``: token shards in, checkpoints out."""

from dataclasses import replace
from typing import Any

from lm.errors import UserError
from lm.model import ModelConfig
from lm.shards import TokenShards
from lm.tokenizer import Tokenizer
from lm.train import TrainConfig, TrainData, Trainer
from tasks import pages
from tasks.machine import training_turn
from tasks.progress import show_progress
from tasks.stage import Draft, Output, stage


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
    tokens, valid = (
        TokenShards([shard.path("tokens.bin") for shard in shards], content["vocab_size"])
        for shards in (train_shards, valid_shards)
    )
    measured = content["valid" if len(valid) else "train"]
    data = TrainData(
        tokens,
        valid if len(valid) else None,
        Tokenizer.load(tokenizer.directory("tokenizer")),
        _bytes_per_token(measured, content["separator"]),
    )
    model = model if model.vocab_size else replace(model, vocab_size=data.tokenizer.size)
    with show_progress("train", config.steps, "step") as progress:
        trainer = Trainer(config, model, data, out.execution, out.directory)
        any(trainer.resume(previous) for previous in out.unfinished)
        out.figures = trainer.run(progress)
    out.records = ["metrics.jsonl", "loss.png"]


def _bytes_per_token(split: dict[str, Any], separator: str) -> float:
    """Bytes of text without the separators, over all tokens: so bits per byte charge the model for every separator it
    must foresee and do not credit it with their bytes."""
    return float((split["bytes"] - split["documents"] * len(separator.encode())) / split["tokens"])
