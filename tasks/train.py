"""Stage ``train``: token shards in, checkpoints out."""

from dataclasses import replace

from lm.errors import UserError
from lm.model import ModelConfig
from lm.tokenizer import Tokenizer
from lm.train import TrainConfig, TrainData, Trainer
from tasks.encode import open_shards
from tasks.progress import progress_bar
from tasks.stage import Draft, Output, stage


@stage("train")
def train(out: Draft, index: Output, tokenizer: Output, model: ModelConfig, config: TrainConfig) -> None:
    """Train the model, going on from the last checkpoint of an attempt that did not finish."""
    content = index.json("index.json")
    if content["tokenizer"] != tokenizer.digest:
        raise UserError("The token shards were made with another tokenizer; refresh the encode stage.")
    valid = open_shards(index, "valid")
    data = TrainData(
        open_shards(index, "train"),
        valid if len(valid) else None,
        Tokenizer.load(tokenizer.directory("tokenizer")),
        content["valid" if len(valid) else "train"]["bytes_per_token"],
    )
    model = model if model.vocab_size else replace(model, vocab_size=data.tokenizer.size)
    trainer = Trainer(config, model, data, out.execution, out.directory)
    any(trainer.resume(previous) for previous in out.unfinished)
    with progress_bar("train", config.steps, "step") as progress:
        out.figures = trainer.run(progress)
    out.records = ["metrics.jsonl", "loss.png"]
