"""Post-trainings for the experiments: each is a job in a directory of its own; it is resumed or reused if it exists."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm.checkpoint.training_checkpoint import load_model
from lm.common.execution import Execution
from lm.data.dialogs import Dialog, Message, PreferencePair
from lm.eval.problems import Problem
from lm.inference.runners.runner import prepare_for_inference
from lm.posttrain.data import write_rows
from lm.posttrain.job import PosttrainJob
from lm.posttrain.objectives.generation import Rollout, encode_prompts, generate_rollouts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.tracking import read_metrics

Example = Dialog | PreferencePair | Problem


def make_dialog(prompt: str, answer: str) -> Dialog:
    """Return a dialog of one prompt and its answer."""
    return Dialog((Message(role="user", content=prompt), Message(role="assistant", content=answer)))


def train(
    directory: Path,
    method: Literal["sft", "distill", "preference", "reinforce"],
    model: Path,
    tokenizer: Path,
    examples: tuple[Sequence[Example], Sequence[Example]],
    config: TrainConfig,
    settings: Mapping[str, Any] | None = None,
    rewards: Mapping[str, float] | None = None,
    teacher: Path | None = None,
    threads: int | None = None,
) -> Path:
    """Train ``model`` on the first ``examples``, evaluate it on the second; return the last checkpoint.

    ``directory`` gets the checkpoints and metrics. If a training in it was interrupted, it is resumed.
    """
    summary = directory / "training.json"
    if not summary.exists():
        print(f"{directory.name}: {config.steps} steps of {method}", file=sys.stderr, flush=True)
        directory.mkdir(parents=True, exist_ok=True)
        paths = directory / "train.jsonl", directory / "valid.jsonl"
        for path, rows in zip(paths, examples, strict=True):
            write_rows(path, rows)
        job = PosttrainJob(
            config=config,
            method=method,
            settings=dict(settings or {}),
            model=str(model),
            tokenizer=str(tokenizer),
            train=str(paths[0]),
            valid=str(paths[1]),
            rewards=dict(rewards or {}),
            teacher=str(teacher or ""),
            digests={},
            out=str(directory),
            execution=Execution(threads=threads, device="auto", log_interval=1),
        )
        with job.prepare() as run:
            run()
    return directory / str(json.loads(summary.read_text(encoding="utf-8"))["last"])


def metrics(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the metrics of the training of a checkpoint, a row per step."""
    return read_metrics(checkpoint.parent / "metrics.jsonl")


def responses(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the responses that a training of rewards learned from; see RolloutRow for the fields."""
    return read_metrics(checkpoint.parent / "rollouts.jsonl")


def answer(
    checkpoint: Path,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    seeds: Sequence[int] | None = None,
) -> list[Rollout]:
    """Answer each prompt: greedily, or with the temperature 1 if there are ``seeds``, one per prompt."""
    model = prepare_for_inference(load_model(checkpoint))
    ids = [*encode_prompts(tokenizer, prompts, model.config.context_length).values()]
    return generate_rollouts(model, tokenizer, ids, seeds, max_new_tokens)
