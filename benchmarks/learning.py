"""Measure how many fewer tokens the fast recipe needs than AdamW with a cosine schedule, on children's stories.

``python -m benchmarks.train --learning [--tokens N] [--directory DIR]``. AdamW trains the model of the preset
``stories-cpu``; the fast recipe is the preset ``stories-fast``. The text is the children's stories in
``../shared/data``, or generated stories if that folder does not exist. Each recipe runs with three learning rates:
AdamW on ``tokens``, the fast recipe on 60 % of them. The best rate of each then runs on four times as many tokens. The
loss is of the whole validation text. ``--directory`` keeps the runs and their curves; a second call resumes them.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.texts import story_file
from flows.config import PipelineConfig
from lm.common.execution import Execution
from lm.data.token_shards import TokenShards
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.stream import encode_files
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer

FAST_TOKEN_SHARE = 0.6  # tokens of the fast recipe over those of AdamW


@dataclass(frozen=True)
class Recipe:
    """A model, its training config, and three learning rates."""

    name: str
    model: ModelConfig
    train: TrainConfig
    rates: tuple[float, float, float]


def recipes(vocab_size: int) -> tuple[Recipe, Recipe]:
    """Return AdamW with a cosine schedule, and the fast recipe."""
    plain, fast = PipelineConfig.load_preset("stories-cpu"), PipelineConfig.load_preset("stories-fast")
    adamw = replace(plain.train, optimizer="adamw", schedule="cosine", min_lr=0.0)
    best = fast.train.max_lr
    return (
        Recipe("adamw", replace(plain.model, vocab_size=vocab_size), adamw, (1.5e-3, 3e-3, 6e-3)),
        Recipe("fast", replace(fast.model, vocab_size=vocab_size), fast.train, (best / 2, best, 2 * best)),
    )


def read_data(directory: Path) -> TrainData:
    """Return the tokens of the stories. The first call makes and saves them."""
    saved_tokenizer = directory / "tokenizer"
    if not saved_tokenizer.exists():
        vocab_size = PipelineConfig.load_preset("stories-fast").tokenizer.vocab_size
        text = story_file("train", directory)
        Tokenizer(*train_bpe(text, vocab_size, [END_OF_TEXT]), [END_OF_TEXT]).save(saved_tokenizer)
    tokenizer = Tokenizer.load(saved_tokenizer)
    shards = []
    for split in ("train", "valid"):
        folder, part = directory / split, directory / f"{split}.part"
        if not folder.exists():
            encode_files([story_file(split, directory)], tokenizer, part)
            part.rename(folder)
        shards.append(TokenShards(sorted(folder.glob("*.bin")), tokenizer.size))
    return TrainData(shards[0], shards[1], tokenizer, 1.0)


def train_for_loss(recipe: Recipe, lr: float, tokens: int, data: TrainData, directory: Path, device: str) -> float:
    """Train, or resume an earlier run, and return the validation loss."""
    steps = round(tokens / (recipe.train.batch_size * recipe.model.context_length))
    config = replace(
        recipe.train,
        steps=steps,
        max_lr=lr,
        min_lr=min(recipe.train.min_lr, lr),
        warmup_steps=max(1, round(0.05 * steps)),
        eval_interval=max(1, steps // 8),
        checkpoint_interval=max(1, steps // 8),
        sample_tokens=0,
    )
    out = directory / f"{recipe.name}-{lr:g}-{tokens}"
    if not (out / "training.json").exists():
        torch._dynamo.reset()  # else the earlier recipes count toward the recompilation limit
        trainer = make_trainer(config, recipe.model, data, Execution(device=device), out)
        trainer.resume(out)
        trainer.run()
    loss = float(json.loads((out / "training.json").read_text())["valid_loss"])
    print(f"{recipe.name:6} lr {lr:<8g} {tokens:>12,} tokens: loss {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def compare(tokens: int, data: TrainData, directory: Path, device: str) -> dict[str, Any]:
    """Train both recipes; return the losses and how many times fewer tokens the fast recipe needs."""
    adamw, fast = recipes(data.tokenizer.size)
    result: dict[str, Any] = {
        "parameters": {recipe.name: parameter_count(recipe.model)["total"] for recipe in (adamw, fast)}
    }
    budgets = {recipe.name: round(share * tokens) for recipe, share in ((adamw, 1.0), (fast, FAST_TOKEN_SHARE))}
    best_losses: dict[str, tuple[float, float]] = {}  # at the two budgets
    for recipe in (adamw, fast):
        budget = budgets[recipe.name]
        losses = {lr: train_for_loss(recipe, lr, budget, data, directory, device) for lr in recipe.rates}
        best = min(recipe.rates, key=losses.__getitem__)
        best_losses[recipe.name] = losses[best], train_for_loss(recipe, best, 4 * budget, data, directory, device)
        result[recipe.name] = {
            f"{budget:,} tokens": {f"{lr:g}": round(loss, 4) for lr, loss in losses.items()},
            f"{4 * budget:,} tokens": {f"{best:g}": round(best_losses[recipe.name][1], 4)},
        }
    target = best_losses["adamw"][1]
    return result | {"tokens_to_loss": 4 * tokens / tokens_for(target, budgets["fast"], *best_losses["fast"])}


def tokens_for(target: float, tokens: int, loss: float, later: float) -> float:
    """Return the number of tokens for the loss ``target``.

    It is interpolated linearly over the logarithm of the tokens, from ``loss`` at ``tokens`` and ``later`` at four
    times as many.
    """
    if later >= loss:
        return math.inf
    return tokens * 4 ** ((loss - target) / (loss - later))
