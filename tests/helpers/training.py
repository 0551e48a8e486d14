"""A small training that tests start, stop and compare."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lm.common.execution import Execution, ParallelKind
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import Job, Pretraining, TrainData, make_trainer
from lm.train.trainer import Trainer
from lm.train.training_job import TrainingJob
from tests.helpers.limits import wait_for

ROOT = Path(__file__).parents[2]
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


def random_tokens(size: int, generator: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Draw ids out of ten. The model can learn which ten."""
    return generator.integers(97, 107, size).astype(np.uint16)


def byte_tokenizer() -> Tokenizer:
    return Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], ["<|endoftext|>"])


def small_data(train: int = 2000, valid: int | None = 300) -> TrainData:
    generator = np.random.default_rng(0)
    train_tokens = random_tokens(train, generator)
    valid_tokens = None if valid is None else random_tokens(valid, generator)
    return TrainData(train_tokens, valid_tokens, byte_tokenizer(), bytes_per_token=1.5)


def train_config(**settings: Any) -> TrainConfig:
    """Return SETTINGS changed by ``settings``, with a warm-up that fits into a short run."""
    settings = {**SETTINGS, "warmup_steps": min(SETTINGS["warmup_steps"], settings.get("steps", 20) - 1), **settings}
    return TrainConfig(**settings)


def small_trainer(out: Path, data: TrainData | None = None, model: ModelConfig = MODEL, **settings: Any) -> Trainer:
    """Make a trainer with one CPU thread, on the CPU by default; ``settings`` are fields of TrainConfig and of
    Execution."""
    execution = Execution(
        threads=1,
        device=settings.pop("device", "cpu"),
        compile=settings.pop("compile", False),
        log_interval=settings.pop("log_interval", 3),
        attention=settings.pop("attention", "auto"),
        activation_checkpointing=settings.pop("activation_checkpointing", False),
        trackers=settings.pop("trackers", []),
        check_memory=settings.pop("check_memory", True),
        min_validations=settings.pop("min_validations", 1),
    )
    return make_trainer(train_config(**settings), model, data or small_data(), execution, out)


def read_rows(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read the rows without times, which differ from run to run."""
    rows = [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
    return [without_times(row) for row in rows]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("tokens_per_second", "seconds", "at")}


def weights_equal(a: TransformerLM, b: TransformerLM) -> bool:
    weights, other = a.state_dict(), b.state_dict()
    return weights.keys() == other.keys() and all(torch.equal(weights[key], other[key]) for key in weights)


def write_job(
    directory: Path,
    processes: int = 1,
    model: ModelConfig = MODEL,
    parallel: Literal["auto"] | ParallelKind = "auto",
    tensor_parallel: int = 1,
    **settings: Any,
) -> Path:
    """Write a job, its tokens and its tokenizer below ``directory``; return the job's path."""
    quiet = {"sample_prompts": [], "eval_interval": 1000, "checkpoint_interval": 5}
    out = directory / "out"
    out.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, size in (("train", 2000), ("valid", 300)):
        random_tokens(size, generator).astype("<u2").tofile(directory / f"{name}.bin")
    byte_tokenizer().save(directory / "tokenizer")
    execution = Execution(
        processes=processes,
        threads=1,
        device="cpu",
        compile=False,
        log_interval=1,
        parallel=parallel,
        tensor_parallel=tensor_parallel,
        min_validations=1,
    )
    job = Job(
        config=train_config(**{**quiet, **settings}),
        model=model,
        train=["../train.bin"],
        valid=["../valid.bin"],
        tokenizer="../tokenizer",
        bytes_per_token=1.5,
        digests={"tokenizer": "t"},
        out=".",
        execution=execution,
    )
    job.write(out / "job.json")
    return out / "job.json"


def train_here(job: TrainingJob, *arguments: Any) -> dict[str, Any]:
    """Run a job in this process; ``arguments`` are those of :meth:`lm.train.trainer.Trainer.run`."""
    with job.prepare() as run:
        return run(*arguments)


def start_and_kill(module: str, job: Path, times: int) -> None:
    """Run ``python -m MODULE JOB`` and kill it soon after its first new row of metrics, several times."""
    generator = random.Random(0)
    metrics = job.parent / "metrics.jsonl"

    def size() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    for _ in range(times):
        before = size()
        process = subprocess.Popen([sys.executable, "-m", module, str(job)], cwd=ROOT, stderr=subprocess.DEVNULL)
        wait_for(lambda: size() != before or process.poll() is not None, 120, "metrics")  # noqa: B023
        try:
            process.wait(generator.uniform(0, 0.5))
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.wait() < 0, "killed before its end"


def validation_loss(trainer: Trainer, sequences: int | None = None) -> float:
    """Return the loss on the validation text; see Pretraining.validation_loss."""
    assert isinstance(trainer.objective, Pretraining)
    return trainer.objective.validation_loss(trainer.model, sequences)
