"""A small training run, which several test files start, stop and compare."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.execution import Execution
from lm.model import ModelConfig, TransformerLM
from lm.recipe import TrainConfig
from lm.tokenizer import Tokenizer
from lm.train import Job
from lm.trainer import TrainData, Trainer

ROOT = Path(__file__).parents[1]
MODEL = ModelConfig(vocab_size=257, context_length=16, d_model=32, num_layers=1, num_heads=2, d_ff=64)
SETTINGS: dict[str, Any] = {
    "steps": 20,
    "batch_size": 4,
    "max_lr": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 4,
    "eval_interval": 4,
    "eval_sequences": 5,
    "checkpoint_interval": 5,
    "sample_prompts": ["a"],
    "sample_tokens": 3,
}


def make_data(train: int = 2000, valid: int | None = 300) -> TrainData:
    """Random ids out of a few, so that there is something to learn: which ones."""
    draws = np.random.default_rng(0)
    tokens = [None if size is None else draws.integers(97, 107, size).astype(np.uint16) for size in (train, valid)]
    assert tokens[0] is not None
    tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], ["<|endoftext|>"])
    return TrainData(tokens[0], tokens[1], tokenizer, bytes_per_token=1.5)


def make(out: Path, data: TrainData | None = None, model: ModelConfig = MODEL, **settings: Any) -> Trainer:
    """A trainer on one thread of the processor; ``settings`` of TrainConfig and of Execution."""
    execution = Execution(
        threads=1,
        device="cpu",
        compile=settings.pop("compile", False),
        log_interval=settings.pop("log_interval", 3),
        recompute=settings.pop("recompute", False),
        trackers=settings.pop("trackers", []),
    )
    return Trainer(TrainConfig(**{**SETTINGS, **settings}), model, data or make_data(), execution, out)


def rows_of(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows without the one figure that is a matter of time."""
    rows = [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def weights_equal(a: TransformerLM, b: TransformerLM) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def write_job(directory: Path, processes: int = 1, model: Any = MODEL, **settings: Any) -> Path:
    """A job of its own directory, on tokens that lie beside it."""
    quiet = {"sample_prompts": [], "eval_interval": 1000, "checkpoint_interval": 5}
    out = directory / "out"
    out.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    for name, size in (("train", 2000), ("valid", 300)):
        draws.integers(97, 107, size).astype("<u2").tofile(directory / f"{name}.bin")
    Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], ["<|endoftext|>"]).save(directory / "tokenizer")
    job = Job(
        TrainConfig(**{**SETTINGS, **quiet, **settings}),
        model,
        ["../train.bin"],
        ["../valid.bin"],
        "../tokenizer",
        1.5,
        {"tokenizer": "t"},
        ".",
        execution=Execution(threads=1, device="cpu", compile=False, log_interval=1, processes=processes),
    )
    job.write(out / "job.json")
    return out / "job.json"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
