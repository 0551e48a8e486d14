"""Measure for how long a checkpoint stops the training: written beside it, and written while it waits.

``python -m benchmarks.checkpoint_stop [--rounds 5]``. The model has 71 million parameters, so weights and AdamW's
state are 850 MB. Both ways take turns: each saves, trains three steps, and waits for the files. *stop* is the time
until :meth:`Trainer.save` returns, and *steps* that of the steps after it, during which the files are written. The
first save takes new memory for the copy, and is given apart. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from lm.common.execution import Execution
from lm.model.config import ModelConfig
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer
from lm.train.trainer import Trainer

_MODEL = ModelConfig(vocab_size=256, context_length=64, d_model=768, num_layers=10, num_heads=12, d_ff=2_048)


def make(directory: Path) -> Trainer:
    """Make the training, and train one step, so that the optimizer has its state."""
    tokens = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)
    tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [])
    config = TrainConfig(steps=1_000, batch_size=2, warmup_steps=1)
    execution = Execution(device="cpu", compile=False)
    trainer = make_trainer(config, _MODEL, TrainData(tokens, tokens[:1_000], tokenizer, 4.0), execution, directory)
    train(trainer)
    return trainer


def train(trainer: Trainer, steps: int = 1) -> float:
    """Train some steps, and return the seconds."""
    started = time.perf_counter()
    for _ in range(steps):
        trainer.train_step(trainer.objective.micro_batches(trainer.step), 1e-4)
        trainer.step += 1
    return time.perf_counter() - started


def measure(trainer: Trainer, has_memory: bool) -> tuple[float, float, float]:
    """Return the seconds of a save, of three steps after it, and until its files are written."""
    with patch("lm.train.checkpoint_writer.free_memory", lambda: 1 << 40 if has_memory else -(1 << 40)):
        started = time.perf_counter()
        trainer.save()
        stop = time.perf_counter() - started
    steps = train(trainer, 3)
    trainer.writer.wait()
    return stop, steps, time.perf_counter() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(Path(folder))
        first, *_ = measure(trainer, has_memory=True)
        results = [(measure(trainer, has_memory=False), measure(trainer, has_memory=True)) for _ in range(rounds)]
        files = sum(path.stat().st_size for path in sorted(Path(folder).glob("step-*"))[-1].iterdir())
        plain = train(trainer, 3)
    names = "stop", "steps", "until_written"
    waiting, beside = (
        {name: round(statistics.median(values), 3) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
        for rows in zip(*results, strict=True)
    )
    print(
        f"{files / 1e6:.0f} MB; three steps without a checkpoint take {plain:.2f} s; the first stop took {first:.2f} s"
    )
    print(json.dumps({"megabytes": files // 1_000_000, "first": first, "waiting": waiting, "beside": beside}))


if __name__ == "__main__":
    main()
